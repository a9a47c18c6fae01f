"""The searches, agents and plans that a comparison is asked for, each under a short name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tvm

from rlflow_tvm.cost import CostModel
from rlflow_tvm.errors import UsageError
from rlflow_tvm.kernels import vector_lanes
from rlflow_tvm.passes import GraphState, Plan, RewriteRule, default_rules
from rlflow_tvm.replay import replay
from rlflow_tvm.search import DEFAULT_SEARCH, Budget, Progress, Search, make_search
from rlflow_tvm.superoptimize import agent_search, optimize


@dataclass(frozen=True)
class Method:
    """A way to a graph. `label`: its name in tables; `described`: the option and its value as they were given;
    `plan_name`: of the file for the plan that it finds, None where the plan is from a file."""

    label: str
    described: str
    source: Plan | Search
    plan_name: str | None = None

    def find(
        self,
        mod: tvm.IRModule,
        cost_model: CostModel,
        rules: Sequence[RewriteRule] = (),
        progress: Progress | None = None,
        on_plan: Callable[[Plan], None] | None = None,
    ) -> GraphState:
        """What it makes of `mod`, by the catalogue and `rules`; Ctrl-C ends a search with the best so far. `on_plan`,
        and errors: of `optimize`, or of `replay`."""
        if isinstance(self.source, Plan):
            return replay(mod, self.source, rules)
        ruleset = default_rules(vector_lanes(cost_model.target), rules)
        return optimize(mod, self.source, cost_model, ruleset, progress, interruptible=True, on_plan=on_plan).state


def methods(
    plans: Sequence[Path], agents: Sequence[Path], searches: Sequence[str], seed: int = 0, budget: Budget | None = None
) -> list[Method]:
    """Plans first (replaying one takes no time, and tells at once that it is for another model), then agents, then
    searches, which are given by name; the default search where nothing is given. One alone has the label `searched`.

    `seed` and `budget` are those of each search and agent.

    Raises:
        UsageError: one is given twice, or no search is called so.
        PlanError, AgentError: a file is unusable.
    """
    searches = searches or ([] if plans or agents else [DEFAULT_SEARCH])
    for option, names in (
        ("--plan", [path.resolve() for path in plans]),
        ("--agent", [path.resolve() for path in agents]),
        ("--search", searches),
    ):
        twice = next((name for name, count in Counter(map(str, names)).items() if count > 1), None)
        if twice is not None:
            raise UsageError(f"{option} {twice}: is given twice; name it once")
    found = [
        Method(f"plan {label}", f"plan {path}", Plan.load(path))
        for label, path in zip(_short(plans), plans, strict=True)
    ]
    found += [
        Method(f"agent {label}", f"agent {path}", agent_search(path, seed, budget), _plan_name(f"agent-{label}"))
        for label, path in zip(_short(agents), agents, strict=True)
    ]
    found += [Method(name, f"search {name}", make_search(name, seed, budget), _plan_name(name)) for name in searches]
    return [replace(found[0], label="searched")] if len(found) == 1 else found


def _plan_name(label: str) -> str:
    """A label may hold a part of a path."""
    return f"{label.replace('/', '_')}.plan.json"


def _short(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths (which are of different files) that tell them apart."""
    whole = [path.resolve().parts for path in paths]
    length = 1
    while len({parts[-length:] for parts in whole}) < len(whole):
        length += 1
    return ["/".join(parts[-length:]) for parts in whole]
