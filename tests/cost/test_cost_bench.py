"""How often a kernel is timed where something else slows the machine down."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from cost_kernels import add, gather, matmul, quotient, unscheduled
from made_clock import Clock
from tvm import te, tirx

from rlflow_tvm.cost import Measurement, bench
from rlflow_tvm.cost.bench import Bench
from rlflow_tvm.cost.caches import LocalCaches
from rlflow_tvm.cost.operands import divisors
from rlflow_tvm.cost.place import Here
from rlflow_tvm.cost.reference import Pace, Reference

pytestmark = pytest.mark.usefixtures("patience")


class Slowdowns:
    """In place of the reference kernel: what it is told to say, before and after each series, then nothing unusual."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)

    def slowdown(self, _usual_secs: float | None = None) -> float:
        return self.values.pop(0) if self.values else 1.0


class Times(Reference):
    """In place of the reference kernel: what it takes, time after time."""

    def __init__(self, *secs: float) -> None:
        self.left, self._best = list(secs), 2.0

    def secs(self) -> float:
        return self.left.pop(0)


@pytest.fixture(scope="module")
def place(target):
    return Here(target)


@pytest.fixture
def timed(place, target, monkeypatch):
    """A bench of which the series are counted, and their seconds made up: 1, 2, 3 ..."""
    made = Bench(target, unscheduled, place, LocalCaches(target))
    series: list[float] = []

    def time(*_arguments):
        series.append(len(series) + 1.0)
        return [series[-1]] * 7

    monkeypatch.setattr(bench, "_time", time)
    made.series = series
    return made


def run(timed: Bench, *slowdowns: float) -> dict:
    timed._reference = Slowdowns(*slowdowns)
    return timed.time(add(4), None, "000")


def test_seconds_are_those_of_the_usual_speed():
    pace = Pace(Times(2.0, 4.0, 2.0, 1.0), usual_secs=3.0)
    pace()
    assert [pace() for _ in range(3)] == pytest.approx([1.0, 1.0, 2.0**0.75])
    interrupted = Pace(Times(30.0, 30.0, 0.1, 0.1), usual_secs=3.0)
    interrupted()
    assert [interrupted() for _ in range(3)] == pytest.approx([0.5**0.75, 0.5**0.75, 2.0**0.75])
    as_they_are = Pace(Times(), usual_secs=None)
    assert [as_they_are(), as_they_are()] == [1.0, 1.0]


def test_slower_than_usual_or_than_ever():
    assert Times(3.0).slowdown(usual_secs=2.5) == 1.2
    reference = Times(3.0, 1.0, 2.0)
    assert [reference.slowdown() for _ in range(3)] == [1.5, 1.0, 2.0]


def test_a_kernel_alone_is_timed_at_the_usual_speed(timed, monkeypatch):
    timed._reference = Slowdowns()
    monkeypatch.setattr(timed, "pace", lambda usual: Pace(Times(2.0, 2.0), usual))
    assert timed.time(add(4), None, "000", usual_secs=1.0)["run_secs"] == pytest.approx(0.5**0.75)


def test_an_undisturbed_series_is_enough(timed):
    assert run(timed, 1.0, 1.02) == {"run_secs": 1.0, "repeats": 7, "spread": 0.0, "slowdown": 1.02}
    assert len(timed.series) == 1


def test_a_disturbed_one_is_repeated(timed):
    """Whether the machine was slow before it or after."""
    found = run(timed, 1.0, 2.0, 3.0, 1.0)
    assert (found["run_secs"], found["slowdown"], len(timed.series)) == (3.0, 1.0, 3)


def test_the_least_disturbed_is_taken_and_says_so(timed):
    found = run(timed, 3.0, 1.0, 1.5, 1.5, 2.0, 2.0)
    assert (found["run_secs"], found["slowdown"], len(timed.series)) == (2.0, 1.5, 3)


def test_on_a_machine_that_is_always_busy_once_must_do(timed):
    for _ in range(4):
        run(timed, *[2.0] * 6)
    assert len(timed.series) == 3 * 3 + 1
    run(timed)  # at last it is quiet: from here on it is worth trying again
    run(timed, 2.0, 2.0)
    assert len(timed.series) == 3 * 3 + 1 + 1 + 2


def _built(clock, samples):
    """What times launches; building it takes long, and is no part of what is timed."""
    clock.had += 99.0
    clock.passed += 99.0
    return samples


@pytest.mark.parametrize("op", ["launch", "usual"])
@pytest.mark.parametrize(
    ("slowdowns", "waited", "expected"),
    [
        ([], [], (1.0, 1.0, 1)),
        ([1.0, 2.0], [], (2.0, 1.0, 2)),
        ([], [1.0], (2.0, 1.0, 2)),
        ([], [2.0, 1.0, 3.0], (2.0, 2.0, 3)),
    ],
    ids=["quiet", "slow", "waiting", "always waiting"],
)
def test_what_is_measured_once_is_measured_undisturbed(timed, monkeypatch, op, slowdowns, waited, expected):
    """Or says how far it is not: the least of three tries."""
    clock, tries = Clock(), []

    def samples(*_arguments):
        clock.had += 1.0
        clock.passed += 1.0 + (waited[len(tries)] if len(tries) < len(waited) else 0.0)
        tries.append(len(tries) + 1.0)
        return [tries[-1]] * 7

    timed._reference = Slowdowns(*slowdowns)
    timed._reference.usual = samples
    monkeypatch.setattr(bench, "launch_timer", lambda *_: _built(clock, samples))
    monkeypatch.setattr(bench, "time", clock)
    found = getattr(timed, op)()
    assert (found["run_secs"], found["slowdown"], len(tries)) == pytest.approx(expected, rel=1e-3)


def test_a_gpus_kernels_have_nothing_to_do_with_the_processor(monkeypatch):
    """No reference kernel is built for them, and nothing is known of what disturbs."""
    gpu = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, {"kind": "llvm", "num-cores": 2})
    monkeypatch.setattr(bench, "Reference", None)
    monkeypatch.setattr(bench, "idle_secs", lambda *_: 0.0)
    monkeypatch.setattr(bench, "queued_secs", lambda *_: [1.0] * 7)
    monkeypatch.setattr(bench, "launch_timer", lambda *_: lambda: [1e-6] * 7)
    made = Bench(gpu, unscheduled, SimpleNamespace(device=tvm.cpu()), LocalCaches(gpu))
    for found in (made.time(add(4), None, ""), made.launch()):
        assert Measurement(**found).slowdown is None


def test_kernels_that_give_nan_are_compared_where_they_give_numbers(place, target):
    made = Bench(target, unscheduled, place, LocalCaches(target))

    def root(of) -> tirx.PrimFunc:
        a = te.placeholder((64,), name="a")
        return te.create_prim_func([a, te.compute((64,), lambda i: of(a[i]), name="b")])

    plain = root(tirx.sqrt)  # half of what is drawn lies below zero
    assert made.difference(plain, root(tirx.sqrt)) == 0.0
    assert 0.1 < made.difference(plain, root(lambda x: tirx.sqrt(x) * tirx.const(2.0, "float32"))) < 10.0
    assert made.difference(plain, root(lambda x: tirx.sqrt(x * x))) == float("inf")


@pytest.mark.parametrize("divide", [tirx.floordiv, tirx.floormod, tirx.truncdiv, tirx.truncmod])
@pytest.mark.parametrize(("shape", "dtype"), [((1,), "int64"), ((4,), "int64"), ((4,), "int32"), ((4,), "float32")])
def test_what_integers_are_divided_by_is_one(place, target, divide, shape, dtype):
    """Also where it goes through a cast and a buffer of the kernel's own."""
    func = quotient(divide, *shape, dtype=dtype)
    assert divisors(func) == {1}
    dividend, divisor, _ = Bench(target, unscheduled, place, LocalCaches(target)).arguments(func)
    assert not dividend.numpy().any()
    assert (divisor.numpy() == 1).all()


def test_nothing_else_is():
    x, y = (te.placeholder((4,), name=name) for name in "xy")
    floats = te.create_prim_func([x, y, te.compute((4,), lambda i: x[i] / y[i])])
    assert [divisors(func) for func in (floats, add(4), matmul(2, 3, 4), gather(3, 4, 5))] == [frozenset()] * 4


@pytest.mark.parametrize(
    ("divisor", "found"),
    [
        (lambda p, q, i: p[q[i]], {0}),  # q's ones might leave p
        (lambda p, q, i: p[i] + q[i], {0, 1}),
        (lambda p, q, i: p[i] * q[i], {0, 1}),
        (lambda p, q, i: 0 - q[i], {1}),
        (lambda p, q, i: tirx.Select(p[i] < 0, -p[i], p[i]) + 1, set()),
        (lambda p, q, i: q[i] - 1, set()),  # of zeros it is none
    ],
    ids=["picked", "sum", "product", "negative", "more", "less"],
)
def test_arithmetic_of_divisors(divisor, found):
    p, q = (te.placeholder((4,), "int64", name=name) for name in "pq")
    inner = te.compute((4,), lambda i: divisor(p, q, i), name="inner")
    for divide in (lambda i: tirx.floormod(i, divisor(p, q, i)), lambda i: tirx.floormod(i, inner[i])):
        assert divisors(te.create_prim_func([p, q, te.compute((4,), divide)])) == found


class Queue:
    """A module of which a launch takes 10 us, or 4 us behind others."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def time_evaluator(self, _name, _device, *, number, repeat):
        self.asked.append((number, repeat))
        return lambda *_arguments: SimpleNamespace(results=[1e-5 if number == 1 else 4e-6] * repeat)


def test_queued_launches_are_timed_without_what_an_idle_one_takes(place):
    queue = Queue()
    assert bench.queued_secs(queue, [], place.device, 3e-6) == pytest.approx([1e-6] * queue.asked[-1][1])
    number, repeats = queue.asked[-1]
    assert number == 100  # a millisecond's
    assert 7 <= repeats <= 50
    assert bench.queued_secs(queue, [], place.device, 5e-6) == pytest.approx([0.05 * 4e-6] * repeats)


def test_slow_kernels_are_not_repeated_beyond_their_time_limit(timed, monkeypatch):
    """It would be the end of the process, and the kernel a failed one."""
    now = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda _secs: None))

    def time(*_arguments):
        timed.series.append(1.0)
        now[0] += 1.9
        return [1.0] * 7

    monkeypatch.setattr(bench, "_time", time)
    assert run(timed, *[2.0] * 6)["slowdown"] == 2.0
    assert len(timed.series) == 2


def test_a_number_by_itself_has_its_own_size_as_range(timed, monkeypatch):
    """As the sum of all there is, which two schedules add up in another order."""
    x = te.placeholder((64, 64), name="x")
    i, j = (te.reduce_axis((0, 64)) for _ in range(2))
    total = te.create_prim_func([x, te.compute((1,), lambda _: te.sum(x[i, j], [i, j]))])
    monkeypatch.setattr(timed, "build", lambda func: {bench.ENTRY: Sums(1.0 if func is total else 1.0 + 1e-6)})
    assert 1e-7 < timed.difference(total, add(4)) < 1e-5


class Sums:
    """A kernel that writes a number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __call__(self, *arguments):
        arguments[-1].copyfrom(np.full((1,), self.number, "float32"))
