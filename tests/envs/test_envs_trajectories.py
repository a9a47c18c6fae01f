"""What is remembered from graph to graph changes nothing: along random rewrites all is as it is from scratch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
from small_models import LANES, MODELS, TARGET

from rlflow_tvm import from_onnx
from rlflow_tvm.cost import CostModel, KernelTimer, Measurement, Temperatures
from rlflow_tvm.envs.observation import observe
from rlflow_tvm.frontend import zoo
from rlflow_tvm.kernels import Kernel, Launches, Lowering, fuse, legalize, split
from rlflow_tvm.passes import GraphState, default_rules
from rlflow_tvm.search import random_states

ZOO = ("demo", "bert-tiny", "squeezenet-tiny")
STEPS = 24
REACH = 3


class KnownTimes(KernelTimer):
    """Every kernel known at once: a time made of its key and temperatures."""

    def measure(
        self, kernels: Sequence[Kernel], on_progress: object = None, graph: object = None, confirmed: bool = True
    ) -> list[Measurement]:
        del on_progress, graph, confirmed
        digits = [int(kernel.key[:6], 16) + len(kernel.cold) + int(kernel.cold or 0) for kernel in kernels]
        return [Measurement(run_secs=1e-9 * number, repeats=1, confirmed=True) for number in digits]

    def launch_secs(self) -> float:
        return 1e-6


def walk(state: GraphState, steps: int, seed: int, visit: Callable[[GraphState], None]) -> GraphState:
    """Random moves, each state that is reached given to `visit`."""
    for reached in random_states(state, steps, np.random.default_rng(seed)):
        state = reached
        if not state.graph.is_empty:
            visit(state)
    return state


def copied(mod: tvm.IRModule) -> tvm.IRModule:
    """The same module, no object of it shared."""
    return tvm.ir.load_json(tvm.ir.save_json(mod))


def described(launches: Launches) -> tuple[object, ...]:
    each = [(launch.key, launch.name, launch.operands, fuse.kernel_key(launch.func)) for launch in launches.launches]
    return each, launches.inputs, launches.weights, launches.outputs


def warmth(kernels: list[Kernel]) -> list[tuple[str, str, int, str]]:
    return [(kernel.key, kernel.name, kernel.count, kernel.cold) for kernel in kernels]


def check_against_scratch(state: GraphState, lowering: Lowering, temperatures: Temperatures) -> Launches:
    """Launches, temperatures, sites, observation and hash of `state` as those of a copy that nothing knows."""
    mod = copied(state.mod)
    fresh = GraphState.from_module(mod, state.ruleset)
    assert fresh.structural_hash == state.structural_hash
    assert fresh.sites == state.sites
    mine, theirs = observe(state), observe(fresh)
    for name in ("nodes", "edges", "edge_links"):
        np.testing.assert_array_equal(getattr(mine["graph"], name), getattr(theirs["graph"], name))
    for name in ("rule_mask", "location_mask", "location_nodes"):
        np.testing.assert_array_equal(mine[name], theirs[name])
    launches, scratch = lowering.launches(state.graph), Lowering(TARGET).launches(mod)
    assert described(launches) == described(scratch)
    assert warmth(temperatures.kernels(launches, REACH)) == warmth(Temperatures(TARGET).kernels(scratch, REACH))
    return launches


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ZOO)
def test_all_is_as_from_scratch(name: str, seed: int) -> None:
    lowering, temperatures = Lowering(TARGET), Temperatures(TARGET)
    with KnownTimes(TARGET) as timer:
        model = CostModel(TARGET, timer=timer)
        visited: set[int] = set()

        def visit(state: GraphState) -> None:
            check_against_scratch(state, lowering, temperatures)
            visited.add(state.structural_hash)
            cost = model.cost(state.graph, reach=REACH)
            if len(visited) % 4 == 1:  # a new model lowers all again, which takes its time
                fresh = CostModel(TARGET, timer=timer)
                assert cost == fresh.cost(copied(state.mod), reach=REACH)
                assert model.reach(state.graph) == fresh.reach(state.mod)

        start = GraphState.from_module(from_onnx(zoo.path(name)), default_rules(LANES))
        walk(start, STEPS, seed, visit)
        assert len(visited) >= STEPS // 2
        assert model.misses == len(visited), "a graph is known by its structure"


@pytest.mark.parametrize("name", MODELS)
def test_forgetting_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for next to nothing, each part forgets again and again, and the same comes out."""
    bound = 10
    for module, limit in ((legalize, "_REMEMBERED_BINDINGS"), (split, "_REMEMBERED"), (fuse, "_REMEMBERED")):
        monkeypatch.setattr(module, limit, bound)
    lowering, temperatures = Lowering(TARGET), Temperatures(TARGET)

    def visit(state: GraphState) -> None:
        check_against_scratch(state, lowering, temperatures)
        held = [
            *vars(lowering._split).values(),
            lowering._legalize._legal,
            lowering._fuse._calls,
            lowering._fuse._groups,
        ]
        most = bound + 4 * len(state.graph.nodes)  # one graph more than it had room for
        assert all(len(memory) <= most for memory in held)

    walk(GraphState.from_module(MODELS[name](), default_rules(LANES)), 8, 0, visit)


def test_only_changed_groups_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = Lowering(TARGET)
    looked_up: list[tuple[object, ...]] = []
    whole = fuse.Fuser._fuse

    def counted(self: fuse.Fuser, group: tuple[object, ...], *others: object) -> fuse.FusedCall:
        looked_up.append(group)
        return whole(self, group, *others)

    monkeypatch.setattr(fuse.Fuser, "_fuse", counted)
    counts: list[tuple[int, int]] = []

    def visit(state: GraphState) -> None:
        looked_up.clear()
        launches = lowering.launches(state.graph).launches
        counts.append((len(looked_up), len(launches)))
        looked_up.clear()
        lowering.launches(state.graph)
        assert not looked_up

    start = GraphState.from_module(from_onnx(zoo.path("bert-tiny")), default_rules(LANES))
    visit(start)
    assert counts[0][0] == counts[0][1] > 20
    counts.clear()
    walk(start, STEPS, 0, visit)
    assert sum(again for again, _ in counts) < sum(launches for _, launches in counts) / 4


def test_no_state_keeps_the_ones_before_it_alive() -> None:
    """Of a long walk only the last state stays."""
    before: list[weakref.ref[object]] = []

    def visit(state: GraphState) -> None:
        before.append(weakref.ref(state.matches))
        before.append(weakref.ref(state.graph))

    last = walk(GraphState.from_module(MODELS["algebra"](), default_rules(LANES)), 12, 0, visit)
    assert before[-2]() is last.matches
    gc.collect()
    assert [reference for reference in before[:-2] if reference() is not None] == []
