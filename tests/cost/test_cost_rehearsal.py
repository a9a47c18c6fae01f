"""Launches played one after the other: on whose storage, how often, what is counted, and what a failing one does."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import tvm
from cost_kernels import SCHEDULE, FakeKernel, add, endless, far_read, gather, two_layers
from fake_workers import workers_by
from made_clock import Clock

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, rehearsal
from rlflow_tvm.cost.rehearsal import Part, Step, call_secs, rehearse, summary
from rlflow_tvm.ir import detach

CPU = tvm.cpu()
F32 = "float32"


class Player:
    """A kernel that notes what it is given, and takes its time."""

    def __init__(self, secs: float = 0.0) -> None:
        self.secs = secs
        self.calls: list[list[tvm.runtime.Tensor]] = []

    def __call__(self, *arguments: tvm.runtime.Tensor) -> None:
        self.calls.append(list(arguments))
        end = time.perf_counter() + self.secs
        while time.perf_counter() < end:
            pass


def address(tensor: tvm.runtime.Tensor) -> int:
    return np.from_dlpack(tensor).__array_interface__["data"][0]


def test_operands_with_one_storage_share_it():
    first, second = Player(), Player()
    parts = [
        Part(first, [((4, 8), F32), ((2, 8), F32)], (0, 1)),
        Part(second, [((2, 8), F32), ((4, 4), "float16"), ((64,), F32)], (1, 0, 2)),
    ]
    rehearse(parts, CPU, 0.0)
    for (x, y), (z, half, other) in zip(first.calls, second.calls, strict=True):
        assert address(y) == address(z)
        assert address(x) == address(half)
        assert len({address(x), address(y), address(other)}) == 3
        assert (tuple(half.shape), str(half.dtype)) == ((4, 4), "float16")
    assert len({address(x) for x, _ in first.calls}) > 1  # storage is placed anew


def test_a_storage_has_room_for_its_largest_operand():
    """Written to its end, it leaves the next one as it was."""

    def fill(value: float):
        def run(*arguments: tvm.runtime.Tensor) -> None:
            for argument in arguments:
                argument.copyfrom(np.full(tuple(argument.shape), value, F32))

        return run

    seen = []

    def look(*arguments: tvm.runtime.Tensor) -> None:
        seen.append([argument.numpy() for argument in arguments])

    large, small = ((1 << 16,), F32), ((3,), F32)
    parts = [
        Part(fill(1.0), [small], (0,)),
        Part(fill(2.0), [large, large], (0, 1)),
        Part(look, [small, large], (0, 1)),
    ]
    rehearse(parts, CPU, 0.0)
    for a, b in seen:
        assert (a == 2.0).all()
        assert (b == 2.0).all()


def placed(*buffers: tuple[tuple[int, ...], str]) -> list[np.ndarray]:
    """What lies at first where all of these do."""
    ((_, operands),) = rehearsal._placed([Part(Player(), buffers, (0,) * len(buffers))], CPU)
    return [operand.numpy().astype("float64") for operand in operands]


@pytest.mark.parametrize("dtype", [F32, "float64", "float16", "bfloat16"])
def test_storage_of_one_type_holds_numbers_of_it(dtype):
    (values,) = placed(((64, 64), dtype))
    assert np.std(values) == pytest.approx(4096**-0.25, rel=0.05)
    assert np.abs(values).max() < 1.0


def test_storage_of_several_types_holds_numbers_of_each():
    for values in placed(((33,), "float16"), ((32,), "bfloat16"), ((16,), F32), ((8,), "float64")):
        assert ((values > 1e-3) & (values < 2.0)).all()


def test_indices_stay_inside_their_table():
    """Whatever was computed where they lie."""
    player, maker = Player(), Player()
    parts = [Part(maker, [((8,), F32)], (0,)), Part(player, [((8,), "int64"), ((8,), "bool"), ((8,), F32)], (0, 0, 0))]
    rehearse(parts, CPU, 0.0)
    for (made,), (index, flag, value) in zip(maker.calls, player.calls, strict=True):
        assert not index.numpy().any()
        assert not flag.numpy().any()
        assert address(value) == address(made)


@pytest.mark.parametrize(("secs", "least", "most"), [(0.0, 16, 64), (0.3, 2, 8)])
def test_runs(secs, least, most):
    """Many of a fast graph, few of a slow one; the first of each placement are not counted."""
    player = Player(secs)
    (samples,), _ = rehearse([Part(player, [((4,), F32)], (0,))], CPU, 0.0)
    assert least <= len(samples) <= most
    assert len(player.calls) > len(samples)
    assert all(each >= secs for each in samples)


def test_what_calling_takes_is_not_counted():
    player = Player(1e-3)
    parts = [Part(player, [((4,), F32)], (0,))]
    ((with_it,), _), ((without,), _) = (rehearse(parts, CPU, called) for called in (0, 4e-4))
    assert np.median(with_it) == pytest.approx(1e-3, rel=0.1)
    assert np.median(without) == pytest.approx(6e-4, rel=0.1)
    (never,), _ = rehearse([Part(Player(), [((4,), F32)], (0,))], CPU, 1.0)
    assert all(each > 0 for each in never)


class Computing(Clock):
    """A kernel that takes some time of its own."""

    def compute(self, *_arguments: tvm.runtime.Tensor) -> None:
        self.passed += 0.02
        self.had += 0.02


@pytest.fixture
def clock(monkeypatch):
    made = Computing()
    monkeypatch.setattr(rehearsal, "time", made)
    return made


def test_each_run_has_a_pace_of_its_own(clock):
    asked = []

    def pace():
        asked.append(1.0 + len(asked) % 2)
        return asked[-1]

    (samples,), _ = rehearse([Part(clock.compute, [((4,), F32)], (0,))], CPU, 0.0, pace)
    assert len(asked) > len(samples)  # before each placement's first, too
    assert samples[:4] == pytest.approx([0.04, 0.02, 0.04, 0.02])


@pytest.mark.parametrize(("secs", "between"), [(4e-3, 2), (6e-3, 1)], ids=["short", "long"])
def test_a_short_run_is_timed_right_after_another(clock, secs, between):
    """Not after the reference kernel, which leaves nothing of it in the private caches."""
    done = ""

    def compute(*_arguments):
        nonlocal done
        taken = 2 * secs if done.endswith("p") else secs  # without a processor at times
        done += "r"
        clock.had += secs
        clock.passed += taken

    def pace():
        nonlocal done
        done += "p"
        return 1.0

    (samples,), waited = rehearse([Part(compute, [((4,), F32)], (0,))], CPU, 0.0, pace)
    assert done == ("rrp" + ("r" * between + "p") * 4) * 8
    longer = 1 if between == 2 else 2
    assert {round(each, 6) for each in samples} == {longer * secs}
    assert waited == pytest.approx(longer, rel=0.02)


@pytest.mark.parametrize(("every", "kept", "waited"), [(5, {0.02}, 1.0), (1, {0.04}, 2.0)], ids=["some", "all"])
def test_interrupted_runs_are_left_out_where_there_are_others(clock, every, kept, waited):
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        clock.compute()
        if len(calls) % every == 0:
            clock.passed += 0.02  # without a processor

    (samples,), found = rehearse([Part(interrupted, [((4,), F32)], (0,))], CPU, 0.0)
    assert {round(each, 6) for each in samples} == kept
    assert len(samples) > len(calls) / 2
    assert found == pytest.approx(waited, rel=0.01)


def test_a_call_takes_little(target):
    assert 0 < call_secs(target, CPU) < 1e-4  # a plausibility bound


def test_summary_of_equal_launches():
    """Each launch's median, their mean; the spread is that of the runs."""
    found = summary([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    assert found["run_secs"] == pytest.approx(3.0)
    assert found["repeats"] == 6
    assert found["spread"] == pytest.approx((5.0 - 2.5) / 3.0)
    with pytest.raises(ValueError, match="the clock gave"):
        summary([[0.0, 0.0]])


def steps(*kernels: FakeKernel) -> tuple[Step, ...]:
    """A chain: the last operand of each is the first of the next."""
    found = []
    for i, kernel in enumerate(kernels):
        inner = range(100 * i + 10, 100 * i + 10 + len(kernel.func.params) - 2)
        found.append(Step(kernel.func, kernel.key, kernel.cold, (i, *inner, i + 1)))
    return tuple(found)


def test_kernels_in_their_graph(target, tmp_path):
    """They are measured together, once; alone they are others."""
    kernels = [FakeKernel(add(64, 64), "sum", "000"), FakeKernel(add(64, 64), "sum", "010"), FakeKernel(add(9), "nine")]
    launches = steps(kernels[0], kernels[1], kernels[2], kernels[0])
    asked = []

    def graph():
        asked.append(1)
        return launches

    with KernelDatabase(tmp_path / "k.sqlite") as database:
        with KernelTimer(target, database, schedule=SCHEDULE) as timer:
            progress = []
            measured = timer.measure(kernels, lambda *counts: progress.append(counts), graph)
            assert progress == [(1, 2), (2, 2)]  # kernels to build
            assert all(m.ok and m.slowdown is not None for m in measured)
            assert (timer.measured, len(asked)) == (3, 1)
            assert measured[0].repeats == 2 * measured[1].repeats  # launched twice
            assert timer.measure(kernels, None, graph) == measured
            assert (timer.measured, len(asked)) == (3, 1)
            assert timer.lookup(kernels[0]) is None
            (alone,) = timer.measure(kernels[:1])
            assert timer.measured == 4
            assert timer.lookup(kernels[0], in_graph=True) == measured[0] != alone
        with KernelTimer(target, database, schedule=SCHEDULE) as timer:
            assert timer.measure(kernels, None, graph) == measured
            assert timer.measure(kernels[:1]) == [alone]
            assert (timer.measured, len(asked)) == (0, 1)


@pytest.mark.parametrize(("bad", "kind"), [(far_read(), "crash"), (endless, "timeout")], ids=["crash", "hang"])
def test_a_failing_kernel_spoils_no_other(target, bad, kind):
    """The others are built again for the worker that takes over."""
    good, wrong, late = FakeKernel(add(4), "good"), FakeKernel(bad, "bad"), FakeKernel(gather(3, 4, 5), "late")
    launches = (*steps(good), Step(bad, "bad", "", tuple(range(len(bad.params)))), *steps(late))
    with KernelTimer(target, timeout_secs=4.0, schedule=SCHEDULE) as timer:
        first, second, third = timer.measure([good, wrong, late], None, lambda: launches)
        assert (first.ok, second.error_kind, third.ok) == (True, kind, True)
        more = FakeKernel(add(5), "more")
        assert timer.measure([wrong], None, lambda: launches) == [second]
        assert timer.measure([more], None, lambda: (*launches, *steps(more)))[0].ok
        assert timer.measured == 4


def test_a_kernel_that_fails_with_warm_operands_fails_with_cold_ones(target):
    with KernelTimer(target, schedule="cost_kernels:refuse") as timer:
        warm, cold = FakeKernel(add(4), "k", "000"), FakeKernel(add(4), "k", "888")
        (first,) = timer.measure([warm], None, lambda: steps(warm))
        both = timer.measure([warm, cold], None, lambda: steps(warm, cold))
    assert [(each.error_kind, each.error) for each in both] == [(first.error_kind, first.error)] * 2


def test_all_kernels_fail(target):
    with KernelTimer(target, schedule="cost_kernels:refuse") as timer:
        kernel = FakeKernel(add(4), "k")
        (measurement,) = timer.measure([kernel], None, lambda: steps(kernel))
    assert measurement.error_kind == "build"


def test_the_worker_forgets_the_oldest(target, monkeypatch, tmp_path):
    """And is told again what it has to build."""
    from rlflow_tvm.cost import stage
    from rlflow_tvm.cost.bench import Bench, schedule_named
    from rlflow_tvm.cost.caches import LocalCaches
    from rlflow_tvm.cost.place import Here

    monkeypatch.setattr(stage, "_MOST_KERNELS", 2)
    bench = Bench(target, schedule_named(SCHEDULE), Here(target), LocalCaches(target))
    held = stage.Stage(bench)
    for name in ("a", "b"):
        held.build(name, add(4))
    assert held.missing(["a"]) == []  # used last
    held.build("c", add(5))
    assert held.missing(["a", "b", "c"]) == ["b"]
    assert held.build("a", add(6))[0] is held.build("a", add(4))[0]
    times = held.rehearse([("a", (0, 1, 2)), ("c", (2, 3, 4))], {"x": [0], "y": [1]})
    assert set(times) == {"x", "y"}

    held, large = stage.Stage(bench), ["a", "b", "c"]  # but not those of a graph that has more
    for size, name in enumerate(held.missing(large), start=4):
        held.build(name, add(size))
    assert held.missing(large) == []
    assert held.rehearse([(name, (0, 1, 2)) for name in large], {"x": [0, 1, 2]})["x"]["run_secs"] > 0
    assert held.missing(["d"]) == ["d"]
    held.build("d", add(9))
    assert held.missing([*large, "d"]) == ["a", "b"]


def test_a_graph_is_timed_as_a_whole(target, monkeypatch):
    """A cost model hands its launches over with the storage that the memory plan gives them."""
    with KernelTimer(target, schedule=SCHEDULE) as timer:
        model = CostModel(target, timer=timer)
        played = []
        rehearse_in = timer._rehearse
        monkeypatch.setattr(timer, "_rehearse", lambda graph, *rest: (played.append(graph), rehearse_in(graph, *rest)))
        cost = model.cost(detach(two_layers()).mod)
        ((first, second),) = played
        assert first.places[-1] == second.places[0]
        assert len({*first.places, second.places[-1]}) == 4  # input, weight, what is between, output
        (kernel,) = model.kernels(detach(two_layers()).mod)
        found = timer.lookup(kernel, in_graph=True)
        assert cost.run_secs == pytest.approx(2 * found.run_secs + cost.launch_secs)
        assert math.isfinite(cost.run_secs)


def test_storage_is_asked_for_by_size(monkeypatch):
    """Where integers lie no float storage is wasted on them."""
    asked = []
    plain = rehearsal.plain_array

    def noted(shape, dtype, *scale):
        asked.append((shape, dtype))
        return plain(shape, dtype, *scale)

    monkeypatch.setattr(rehearsal, "plain_array", noted)
    rehearse([Part(Player(0.2), [((5,), "int8"), ((3, 3), F32)], (0, 1))], CPU, 0.0)
    assert set(asked) == {((9,), F32), ((5,), "int8")}


KILLED = {"error": "the worker was killed (SIGKILL; short of memory?)", "error_kind": "crash", "passing": True}
LATE = {"error": "no answer within 30 s", "error_kind": "timeout"}


class Ending(workers_by(lambda _features, _cold: 1e-6)):
    """A worker that ends on the first requests of one kind, and another takes over, which has built nothing."""

    def __init__(self, op: str, *ends: dict) -> None:
        super().__init__()
        self.op, self.ends = op, list(ends)

    def answers(self, requests, limit_secs, tries=1):
        for number, request in enumerate(requests):
            if request["op"] == self.op and self.ends:
                self.built.clear()
                yield number, self.ends.pop(0)
            else:
                yield from ((number, answer) for _, answer in super().answers([request], limit_secs, tries))


@pytest.mark.parametrize("op", ["missing", "rehearse"])
@pytest.mark.parametrize("end", [KILLED, LATE], ids=["killed", "late"])
def test_a_graph_has_a_second_try(target, op, end):
    """What became of the first says nothing of its kernels."""
    kernels = [FakeKernel(add(4), "four"), FakeKernel(add(5), "five")]
    with KernelTimer(target) as timer:
        timer._workers = Ending(op, end)
        assert all(measured.ok for measured in timer.measure(kernels, None, lambda: steps(*kernels)))
        assert timer.measured == 2


@pytest.mark.parametrize("op", ["missing", "rehearse"])
@pytest.mark.parametrize("end", [KILLED, LATE], ids=["killed", "late"])
def test_a_graph_that_fails_twice_fails_for_this_process(target, op, end):
    kernel = FakeKernel(add(4), "four")
    with KernelDatabase(":memory:") as database:
        for ends, fails in (([end, end], True), ([], False)):
            with KernelTimer(target, database) as timer:
                timer._workers = Ending(op, *ends)
                (measured,) = timer.measure([kernel], None, lambda: steps(kernel))
                assert measured.error == (end["error"] if fails else None)


def test_a_graph_that_crashes_its_worker_has_no_second_try(target):
    crash = {"error": "the worker died of SIGSEGV", "error_kind": "crash"}
    kernel = FakeKernel(add(4), "four")
    with KernelTimer(target) as timer:
        timer._workers = Ending("rehearse", crash)
        assert timer.measure([kernel], None, lambda: steps(kernel))[0].error == crash["error"]
