"""The pass that users put into a build to search and rewrite; `replay.ApplyPlan` repeats what it found."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm
from tvm import relax

from rlflow_tvm.cost import (
    LEAST_ROUNDS,
    CostModel,
    EndToEnd,
    KernelDatabase,
    PredictionPolicy,
    Ratio,
    RpcDevices,
    check_remote,
    default_path,
    export_library,
    measure_interleaved,
    scratch_folder,
)
from rlflow_tvm.envs import ENVIRONMENTS, RewriteProblem
from rlflow_tvm.errors import AgentError, CostError, PlanError, RewriteError, RlflowError, UncomparableError, UsageError
from rlflow_tvm.frontend import random_inputs
from rlflow_tvm.ir import main_of
from rlflow_tvm.kernels import Choices, as_target, current_target, extract_kernels, num_cores, pipeline, vector_lanes
from rlflow_tvm.passes import CATALOGUE, GraphState, Plan, RewriteRule, RuleSet, default_rules, own_rules
from rlflow_tvm.search import DEFAULT_SEARCH, Budget, Progress, Search, SearchResult, check_seed, make_search
from rlflow_tvm.signals import ended_in_order
from rlflow_tvm.verify import check_state, with_weights

log = logging.getLogger("rlflow_tvm")

_SLOWER = 0.99
"""The most of another module's time over the new one's, in any round, at which the new one is given up."""


def optimize(
    mod: tvm.IRModule,
    search: Search,
    cost_model: CostModel,
    rules: RuleSet | None = None,
    progress: Progress | None = None,
    *,
    interruptible: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
) -> SearchResult:
    """Search for a cheaper graph that computes the same, and check that it does.

    With `interruptible`, Ctrl-C ends the search with the best graph so far, and a second one the program. `on_plan` is
    told of the plan before its outputs are checked: that takes a while too, and may be interrupted; and of the best so
    far where the search is given up, or an error ends it.

    RewriteError if its outputs on random inputs differ from those of `mod`, which says where the plan is kept;
    UncomparableError if nothing can be told by them; errors of the rooms below as they are.
    """
    problem = RewriteProblem(mod, cost_model, rules)
    with _stopped_by_ctrl_c(problem) if interruptible else nullcontext():
        try:
            result = search.run(problem, progress)
        except BaseException:  # hours of search shall not be lost, whatever ended them
            if problem.best.actions and on_plan is not None:
                on_plan(problem.best.plan)
            raise
    if result.state.actions:
        if on_plan is not None:
            on_plan(result.plan)
        _check(result, cost_model)
    return result


def _check(result: SearchResult, cost_model: CostModel) -> None:
    """RewriteError where the new module's outputs differ from the model's, which says where the plan is kept."""
    try:
        if cost_model.timer.remote is None:
            check_state(result.state, cost_model.target, choices=cost_model.choices)
        else:  # outputs are compared here, where what was measured there decides nothing
            check_state(result.state, as_target(None))
    except UncomparableError:
        raise
    except RewriteError as error:
        raise RewriteError(f"{error}; the plan, which must not be used, {_kept(result.plan)}") from error


@contextmanager
def unchecked_kept(write: Callable[[Plan], Path | None]) -> Iterator[Callable[[Plan], None]]:
    """What `optimize` is to tell of plans: where it is ended, by a signal too, before their outputs are
    compared, `write` is given the last one, and says where it is, if anywhere. Until they are compared it lies beside
    the database too: what computes them may end the process without a word."""
    told: list[Plan] = []
    aside: Path | None = None

    def on_plan(plan: Plan) -> None:
        nonlocal aside
        told.append(plan)
        aside = keep_plan(plan, "unchecked")

    try:
        with ended_in_order():
            yield on_plan
    except BaseException as error:
        compared = isinstance(error, RewriteError) and not isinstance(error, UncomparableError)  # and differ
        if told and not compared and (place := _written(write, told[-1])) is not None:
            log.warning("outputs were not compared: the plan written to %s is unchecked", place)
        raise
    finally:
        if aside is not None:
            aside.unlink(missing_ok=True)


def _written(write: Callable[[Plan], Path | None], plan: Plan) -> Path | None:
    """As `write`; where that fails the log is told, as what led here shall not be hidden by it."""
    try:
        return write(plan)
    except PlanError as error:
        log.warning("%s", error)
        return None


def save_plan(plan: Plan, path: Path) -> Path:
    """Write a plan to `path`; where that cannot be (a full disk, a folder that is gone) it is kept beside the database,
    which the PlanError says."""
    try:
        plan.save(path)
    except PlanError as error:
        place = keep_plan(plan)
        raise PlanError(str(error) if place is None else f"{error}; the plan is kept in {place}") from error
    return path


def keep_plan(plan: Plan, name: str = "last", own: Plan | None = None) -> Path | None:
    """Where a plan is kept that nobody asked for: beside the database, if it can be (the log is told), as what comes
    after a search may fail. `name`: what the file there begins with. What another search left as the last is kept as
    the former one: this one may have found less. `own`: what this search has left there before."""
    path = default_path().with_name(f"{name}.{plan.start_hash:016x}.plan.json")
    try:
        if name == "last" and (plan.actions or own is not None):
            ours = [each.actions for each in (plan, own) if each is not None]
            if (former := plan_in(path)) is not None and former.actions not in ours:
                former.save(path.with_name(path.name.replace(name, "former", 1)))
        plan.save(path)
    except PlanError as error:
        log.warning("%s", error)
        return None
    return path


def plan_in(path: Path) -> Plan | None:
    """The plan in a file; None where there is none, nothing in it that could be lost, or something else."""
    try:
        plan = Plan.load(path)
    except PlanError:
        return None
    return plan if plan.actions else None


def keep_given_up(plan: Plan) -> None:
    """Keep what `keep_if_not_slower` gave up, under a name that says so; the log is told where."""
    if (place := keep_plan(plan, "slower")) is not None:
        log.warning("the plan that was found is kept in %s", place)


def _kept(plan: Plan) -> str:
    """Where a plan is that only the report of a bug is to have: it is written now, and would be lost with the error."""
    path = default_path().with_name(f"wrong.{plan.end_hash:016x}.plan.json")
    try:
        plan.save(path)
    except PlanError as error:
        return f"is lost: {error}"
    return f"is in {path}"


def keep_if_not_slower(
    result: SearchResult, cost_model: CostModel, on_progress: Callable[[int, int], None] | None = None
) -> tuple[SearchResult, Ratio | None]:
    """`result`, and the model's time over the new module's; if that is slower than a graph in which families of rules
    are settled, or than the model as it was, that one in its place.

    Prices are sums of kernels' times. A search that takes the least of thousands takes their errors with it, and on a
    machine that others use meanwhile these are large: so the modules are built and timed as wholes, in turns. None
    where there is nothing to time, or it cannot be timed here: a GPU, another machine, no C++ compiler (which is told).

    RewriteError if a settled graph's outputs differ from the model's; it says where that graph's plan is kept.
    """
    if not result.state.actions or cost_model.timer.remote is not None or cost_model.target.kind.name != "llvm":
        return result, None
    before = result.state.origin()
    states = {"before": before, "after": result.state}
    settled, found = result.settled, result.state.structural_hash
    if settled and settled.run_secs < result.run_secs_before and settled.state.structural_hash != found:
        states["settled"] = settled.state
    try:
        timed = _timed(states, cost_model, on_progress)
    except CostError as error:
        log.warning("whether the new module is faster as a whole was not measured: %s", error)
        return result, None
    gain = Ratio.of(timed["before"], timed["after"])
    if settled and "settled" in timed and _is_slower(over := Ratio.of(timed["settled"], timed["after"])):
        log.warning(
            "as a whole module the graph found takes %.2f times as long as one in which no more is done than to settle "
            "whole families of rules, which takes its place: search again while the machine has nothing else to do",
            1 / over.median,
        )
        result = replace(result, state=settled.state, run_secs_after=settled.run_secs)
        gain = Ratio.of(timed["before"], timed["settled"])
        if not _is_slower(gain):
            _check(result, cost_model)
    if not _is_slower(gain):
        return result, gain
    log.warning(
        "as a whole module the graph found takes %.2f times as long as the model, which is left as it was: "
        "search again while the machine has nothing else to do",
        1 / gain.median,
    )
    return replace(result, state=before, run_secs_after=result.run_secs_before), gain


def _is_slower(ratio: Ratio) -> bool:
    """Whether the new one of the two is, beyond doubt."""
    return ratio.interval is not None and ratio.interval[1] < _SLOWER


def _timed(
    states: Mapping[str, GraphState], cost_model: CostModel, on_progress: Callable[[int, int], None] | None
) -> dict[str, EndToEnd]:
    """Whole modules of the states, built with measured choices and timed in turns; CostError where they cannot be. None
    has a tuned schedule: the search's prices know of none, and tuned was one of the graphs at most."""
    modules = {name: with_weights(state) for name, state in states.items()}
    target, choices = cost_model.target, Choices(cost_model.choices.implementation)
    with scratch_folder() as folder:
        candidates = {
            name: export_library(mod, target, Path(folder) / f"{name}.so", pipeline(target, choices))
            for name, mod in modules.items()
        }
        inputs = list(random_inputs(modules["before"], 0).values())
        with cost_model.timer.in_turn():
            return measure_interleaved(
                candidates, inputs, LEAST_ROUNDS, threads=num_cores(target), on_progress=on_progress
            )


@contextmanager
def _stopped_by_ctrl_c(problem: RewriteProblem) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)

    def stop(_signal: int, _frame: Any) -> None:
        log.warning("interrupted: the best graph so far is taken; once more gives up")
        problem.stopped = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def check_agent_rules(agent: object, rules: object) -> None:
    """UsageError where both are given: an agent knows nothing of rules beside the catalogue."""
    if agent and rules:
        raise UsageError("agents know the rules of the catalogue alone: give no rules with an agent, or use a search")


def agent_search(path: str | Path, seed: int = 0, budget: Budget | None = None) -> Search:
    """The search that a trained agent's checkpoint makes, until the budget is spent or else for a few episodes;
    AgentError if the file is unusable. Needs `[agents]`."""
    check_seed(seed)
    from rlflow_tvm.agents import kind_in
    from rlflow_tvm.search.agent_search import AgentSearch

    names = [rule.name for rule in CATALOGUE]
    kind = kind_in(path)
    agent = kind.load(path, ENVIRONMENTS[kind.environment].observations(len(names)))
    if agent.metadata.get("rules") != names:
        raise AgentError(f"{path}: the agent was trained with other rules than this version has: train it again")
    horizon = int(agent.metadata["horizon"])
    settled = "begins" in agent.metadata
    return OneThread(
        AgentSearch(agent, seed, horizon=horizon, budget=budget, environment=kind.environment, settled=settled)
    )


@dataclass(frozen=True)
class OneThread:
    """A search that gives torch one thread: its graphs are small, and spinning threads would disturb the kernels being
    timed. The caller's number is set again at the end."""

    search: Search

    def run(self, problem: RewriteProblem, progress: Progress | None = None) -> SearchResult:
        """What `search` finds."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self.search.run(problem, progress)
        finally:
            torch.set_num_threads(before)


@tvm.transform.module_pass(opt_level=0, name="rlflow_tvm.Superoptimize")
class Superoptimize:
    """Rewrite `main` into the cheapest equal graph that `search` (or the `agent` of a checkpoint) finds.

    Kernels that the database of measured times does not hold yet are built and timed on this machine. The plan is kept
    beside the database (`last.HASH.plan.json`) as soon as it is found, whatever comes then.

    Args:
        target: a TVM target, or what `rlflow_tvm.kernels.as_target` takes; by default the one that the pass is run
            under, as by `tvm.compile`, else this machine.
        search: name in `rlflow_tvm.search.SEARCHES`; not looked at where `agent` is given.
        agent: path of an agent's checkpoint.
        seed: of random choices.
        predict: how much of a graph's time the search may predict rather than measure, 0 to 1.
        budget: what the search may spend: moves tried ("20000") or a time ("90s", "5m"); by default each search's own.
        progress: told of how far the search is.
        rules: of your own, beside the catalogue, or the file that they are proved in (`rlflow_tvm.passes.own_rules`); a
            plan with them is repeated by `ApplyPlan(plan, rules)`. Agents know the catalogue alone: UsageError.
        remote: measure on these machines, which `target` describes (CostError where it does not say how many cores they
            have); the module found is then not run here.

    `result` is what the last search found, with the plan that `ApplyPlan` repeats; None before the first, and where one
    ended in an error. `gain` is what that gained in a whole module's time (`keep_if_not_slower`): beyond doubt below 1
    where what was found was slower, so that the module was left as it was.
    """

    result: SearchResult | None = None
    gain: Ratio | None = None

    def __init__(
        self,
        target: Any = None,
        search: str = DEFAULT_SEARCH,
        agent: str | Path | None = None,
        seed: int = 0,
        predict: float = 0.0,
        budget: str | None = None,
        progress: Progress | None = None,
        rules: str | Path | Iterable[RewriteRule] = (),
        remote: RpcDevices | None = None,
    ) -> None:
        self.rules = own_rules(rules)
        check_agent_rules(agent, self.rules)
        if remote is not None:
            check_remote("llvm" if target is None else target)
        self.remote = remote
        self.target = None if target is None else as_target(target)
        self.policy = PredictionPolicy(share=predict)
        spend = None if budget is None else Budget.parse(budget)
        self.search = make_search(search, seed, spend) if agent is None else agent_search(agent, seed, spend)
        self.progress = progress

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        self.result = self.gain = None
        target = self.target or current_target()
        rules = default_rules(vector_lanes(target), self.rules)
        with (
            KernelDatabase(default_path()) as database,
            CostModel(target, database, policy=self.policy, remote=self.remote) as cost_model,
        ):
            if not _computes(mod, target):
                self.result = _nothing_to_do(mod, rules)
                return mod
            with unchecked_kept(keep_plan) as on_plan:
                found = optimize(mod, self.search, cost_model, rules, self.progress, on_plan=on_plan)
            if len(found.plan):
                keep_plan(found.plan)
            self.result, self.gain = keep_if_not_slower(found, cost_model)
            if self.result.plan != found.plan:
                keep_given_up(found.plan)
                keep_plan(self.result.plan, own=found.plan)
        return self.result.state.bound()


def _computes(mod: tvm.IRModule, target: tvm.target.Target) -> bool:
    """Whether `main` launches any kernel: it does not where it returns parameters, constants or views of them."""
    body = main_of(mod).body
    return not (isinstance(body, relax.SeqExpr) and not body.blocks) and bool(extract_kernels(mod, target))


def _nothing_to_do(mod: tvm.IRModule, rules: RuleSet) -> SearchResult | None:
    """What a search finds where nothing takes time; None where `main` is no graph that a plan could be for."""
    try:
        state = GraphState.from_module(mod, rules)
    except RlflowError:
        return None
    return SearchResult(state, 0.0, 0.0, 0, 0, 0, 0.0, ((0, 0.0),))
