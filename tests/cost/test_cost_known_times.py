"""What is known of a kernel: its first time, the second that stands, and the speed that both are reckoned to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
import pytest
from cost_kernels import FakeKernel, add, matmul, two_layers
from fake_workers import workers_by
from test_cost_rehearsal import KILLED, Ending, steps

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement, graph_timer
from rlflow_tvm.cost.calibration import CALM, PATIENCE, Moment, Patience, Told, moment_of, unrest_of
from rlflow_tvm.cost.known_times import KnownTimes
from rlflow_tvm.errors import UsageError
from rlflow_tvm.ir import detach

pytestmark = pytest.mark.usefixtures("patience")

BAD = Measurement(error="boom", error_kind="run")


def secs(run_secs: float, *, confirmed: bool = False) -> Measurement:
    return Measurement(run_secs=run_secs, repeats=5, confirmed=confirmed)


def factors(known: dict[str, Measurement], *told: Mapping) -> dict[str, float]:
    rehearsal = Told(*told)
    return (moment_of(known, rehearsal) or Moment()).factors(rehearsal)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, 1.0),
        ({"a": secs(2.0), "b": secs(6.0), "c": secs(5.0)}, 2.0),  # 1 has weight 5, 2 has 7
        ({"c": secs(2.5)}, 0.5),
        ({"a": secs(4.0)}, 1.0),  # too little of the whole
        ({"gone": secs(4.0)}, 1.0),
        ({"c": secs(50.0)}, 2.0),  # no machine is ten times slower than it was: that one was interrupted
        ({"c": secs(0.5)}, 0.5),
    ],
    ids=["nothing", "all", "one", "a little", "elsewhere", "slow", "fast"],
)
def test_factors(known, expected):
    found = {"a": 1.0, "b": 3.0, "c": 5.0}
    reckoned = factors(known, found, {"a": 1, "b": 2, "c": 1}, dict.fromkeys(found, 0))
    assert reckoned == dict.fromkeys(found, pytest.approx(expected, rel=0.04))


def test_factors_of_nothing():
    assert factors({}, {}, {}, {}) == {}


def loud(traffic: dict[str, int]) -> tuple[dict[str, Measurement], dict[str, float]]:
    """What kernels of a second each, by their traffic, took before, and now that others use the memory."""
    return (
        {name: secs(1.0) for name in traffic},
        {name: 1.02 * math.exp(1e-6 * size**0.5) for name, size in traffic.items()},
    )


TRAFFIC = {name: (1 << i) * 10**7 for i, name in enumerate("abcdefghij")}


@pytest.mark.parametrize("new", "aej")
def test_memory_makes_a_difference(new):
    """A kernel is reckoned to what others with as much traffic took, here and before."""
    before, now = loud(TRAFFIC)
    del before[new]
    reckoned = factors(before, now, dict.fromkeys(TRAFFIC, 1), TRAFFIC)
    one = factors(before, now, dict.fromkeys(TRAFFIC, 1), dict.fromkeys(TRAFFIC, 0))
    assert abs(reckoned[new] * now[new] - 1.0) < 0.5 * abs(one[new] * now[new] - 1.0)


def test_one_that_is_far_off_changes_little():
    before, now = loud(TRAFFIC)
    without = factors(before, now, dict.fromkeys(TRAFFIC, 1), TRAFFIC)
    reckoned = factors(before | {"e": secs(0.4)}, now, dict.fromkeys(TRAFFIC, 1), TRAFFIC)
    assert reckoned == {name: pytest.approx(each, rel=0.02) for name, each in without.items()}


def test_the_line_ends_where_knowledge_does():
    before, now = loud(TRAFFIC)
    now["far"] = 1.0
    reckoned = factors(before, now, dict.fromkeys(now, 1), {**TRAFFIC, "far": 100 * max(TRAFFIC.values())})
    assert reckoned["far"] == min(reckoned.values()) == pytest.approx(reckoned["j"])


def test_a_moment_is_no_unrest():
    """Nor is one kernel whose known time is wrong."""
    before, now = loud(TRAFFIC)
    rehearsal = Told(now, dict.fromkeys(TRAFFIC, 1), TRAFFIC)
    assert unrest_of(before, rehearsal) < 0.01
    assert unrest_of(before | {"e": secs(2.0)}, rehearsal) < 0.02
    assert unrest_of({}, rehearsal) == 0.0


@pytest.mark.parametrize("off", [0.02, 0.1])
def test_unrest_is_a_deviation(off):
    """Of what is left when the moment is taken out, however many kernels there are."""
    rng = np.random.default_rng(0)
    names = [str(i) for i in range(400)]
    now = {name: 1.3 * math.exp(off * rng.standard_normal()) for name in names}
    rehearsal = Told(now, dict.fromkeys(names, 1), dict.fromkeys(names, 0))
    assert unrest_of({name: secs(1.0) for name in names}, rehearsal) == pytest.approx(off, rel=0.15)


def test_patience_ends_where_it_is_in_vain(caplog):
    """It is told once, and comes back with calm moments; what is much worse than usual is tried again all the same."""
    patience = Patience()
    assert patience.enough == CALM
    for _ in range(5):
        patience.note(0.08)
    assert 0.08 < patience.enough < 0.16
    assert [record.message for record in caplog.records if "8 %" in record.message] == [caplog.records[0].message]
    for _ in range(5):
        patience.note(0.0)  # nothing was known
    assert patience.enough > 0.08
    for _ in range(9):
        patience.note(0.01)
    assert patience.enough == CALM


def test_how_much_patience_there_is_can_be_said(monkeypatch):
    for said, tries in (("0", 1), ("5", 6)):
        monkeypatch.setenv(PATIENCE, said)
        assert Patience().tries == tries
    monkeypatch.setenv(PATIENCE, "some")
    with pytest.raises(UsageError, match="RLFLOW_TVM_PATIENCE=some: a whole number is expected"):
        Patience()


class UneasyTimer(KernelTimer):
    """Of which kernels are off their law in uneasy rehearsals, given by number: every other one by a tenth more, the
    rest by a tenth less."""

    def __init__(self, target, *uneasy: int) -> None:
        super().__init__(target)
        self._workers, self.plays = workers_by(lambda features, _: 1e-6 * features["flops"])(), 0
        rehearse = self._workers._rehearse

        def moved(request):
            self.plays += 1
            times, shaken = rehearse(request)["times"], self.plays in uneasy
            factors = itertools.cycle((1.1, 0.9) if shaken else (1.0,))
            return {
                "times": {name: {**each, "run_secs": next(factors) * each["run_secs"]} for name, each in times.items()}
            }

        self._workers._rehearse = moved


@pytest.mark.parametrize(("uneasy", "plays"), [((), 1), ((4,), 2), ((4, 5), 3), ((4, 5, 6), 3)])
def test_an_uneasy_rehearsal_is_repeated(target, monkeypatch, uneasy, plays):
    """Until the known kernels take what they took, three times at most; the calmest counts."""
    waited = []
    monkeypatch.setattr(graph_timer.time, "sleep", waited.append)
    known = [FakeKernel(add(64 + i), f"k{i}") for i in range(8)]
    new = FakeKernel(add(32), "new")
    timer = UneasyTimer(target, *uneasy)
    timer.measure(known, None, lambda: steps(*known), confirmed=True)
    assert (timer.plays, len(waited)) == (3, 2)  # nothing tells of the first graph, which tells of all others
    (measured,) = timer.measure([new], None, lambda: steps(*known, new))
    assert (timer.plays - 3, len(waited) - 2) == (plays, plays - 1)
    assert measured.run_secs is not None
    calm = len(uneasy) < 3
    assert measured.run_secs == pytest.approx(32e-6, rel=1e-6 if calm else 0.15)


def test_the_second_time_stands(tmp_path):
    kernel = FakeKernel(add(4), "k")
    path = tmp_path / "k.sqlite"
    with KernelDatabase(path) as database, KernelDatabase(path) as another:
        times, others = KnownTimes("t", database), KnownTimes("t", another)
        assert times.unknown([kernel], "1") == {"k": kernel}
        assert times.learn("k", "1", secs(1.0))
        assert others.find(kernel, "1") == secs(1.0)
        assert times.single([kernel], "1") == {"k": kernel}
        assert not times.learn("k", "1", BAD)  # says nothing
        assert times.find(kernel, "1") == secs(1.0)
        assert not times.learn("k", "1", secs(2.0))
        assert times.find(kernel, "1") == secs(2.0, confirmed=True)
        times.learn("k", "1", secs(3.0))
        assert times[kernel, "1"] == secs(2.0, confirmed=True)
        assert (times.single([kernel], "1"), times.revision) == ({}, 1)
        assert times.find(kernel, "2") is None
        assert (others[kernel, "1"], others.revision) == (secs(1.0), 0)
        others.refresh()
        assert (others[kernel, "1"], others.revision) == (secs(2.0, confirmed=True), 1)
        others.refresh()
        assert others.revision == 1
        assert KnownTimes("t", database).find(kernel, "1") == secs(2.0, confirmed=True)


def test_what_is_not_kept_is_known_here():
    times = KnownTimes("t", KernelDatabase(":memory:"))
    times.learn("k", "1", BAD, keep=False)
    assert times.find(FakeKernel(add(4), "k"), "1") == BAD
    assert times.stored("k", "1") is None


@pytest.mark.parametrize("late", [BAD, secs(5.0)], ids=["failed", "first"])
def test_what_another_process_has_confirmed_stays(tmp_path, late):
    """Whatever this one, which did not know of it, measured at the same time."""
    kernel, path = FakeKernel(add(4), "k"), tmp_path / "k.sqlite"
    with KernelDatabase(path) as database, KernelDatabase(path) as another:
        times, others = KnownTimes("t", database), KnownTimes("t", another)
        assert others.unknown([kernel], "1") == {"k": kernel}
        times.learn("k", "1", secs(1.0))
        times.learn("k", "1", secs(2.0))
        assert others.learn("k", "1", late)
        assert others[kernel, "1"] == secs(2.0, confirmed=True)
        assert KnownTimes("t", database).find(kernel, "1") == secs(2.0, confirmed=True)


def test_what_failed_here_is_known_where_others_could_measure_it(tmp_path):
    kernel, path = FakeKernel(add(4), "k"), tmp_path / "k.sqlite"
    with KernelDatabase(path) as database, KernelDatabase(path) as another:
        times, others = KnownTimes("t", database), KnownTimes("t", another)
        times.learn("k", "1", BAD, keep=False)
        others.learn("k", "1", secs(1.0))
        times.refresh()
        assert (times[kernel, "1"], times.revision) == (secs(1.0), 1)


class MovingTimer(KernelTimer):
    """All kernels of a rehearsal take so many times their law's time, another number from one rehearsal to the next."""

    def __init__(self, target, database, *moments: float) -> None:
        super().__init__(target, database)
        laws = workers_by(lambda features, _: 1e-6 * self.kind(features) * features["flops"])
        self._workers, moving = laws(), itertools.cycle(moments)
        rehearse = self._workers._rehearse

        def moved(request):
            moment = next(moving)
            times = rehearse(request)["times"]
            return {"times": {name: {**each, "run_secs": moment * each["run_secs"]} for name, each in times.items()}}

        self._workers._rehearse = moved
        self.kind = lambda features: 1.0


def timed(timer: KernelTimer, launches, *kernels: FakeKernel, confirmed: bool = False) -> list[float]:
    found = timer.measure(kernels, None, lambda: launches, confirmed=confirmed)
    return [each.run_secs * 1e6 for each in found if each.run_secs is not None]


def test_a_moments_speed_is_not_a_kernels(target):
    """What is measured later is reckoned to the speed at which what is confirmed in its graph was."""
    old, new, far = FakeKernel(add(64), "old"), FakeKernel(add(32), "new"), FakeKernel(add(4096), "far")
    timer = MovingTimer(target, None, *[1.0] * 6, 0.5, *[3.0] * 3)  # where nothing is known, three times
    assert timed(timer, steps(old), old) == [64.0]
    assert timed(timer, steps(old), old, confirmed=True) == [64.0]
    assert timed(timer, steps(old, new), old, new) == pytest.approx([64.0, 32.0])
    assert timed(timer, steps(new, far), far) == pytest.approx([3 * 4096.0])  # too little of it is confirmed


@pytest.mark.parametrize("anchored", [True, False])
def test_a_graph_of_which_nothing_is_known_is_reckoned_by_the_anchor(target, anchored):
    """Which is timed right after it, in the same moment."""
    old, other, new = FakeKernel(add(64), "old"), FakeKernel(add(512), "other"), FakeKernel(add(4096), "new")
    timer = MovingTimer(target, None, *[1.0] * 6, *([1.3] * 6 + [0.8] * 6 if anchored else [1.3] * 6))
    known = steps(old, other)
    timer.anchor = (lambda: known) if anchored else None
    assert timed(timer, known, old, other) == [64.0, 512.0]  # itself tells nothing of itself
    assert timed(timer, known, old, other, confirmed=True) == [64.0, 512.0]
    first = timed(timer, steps(new), new)
    assert first == pytest.approx([4096.0 if anchored else 1.3 * 4096.0])
    if not anchored:
        timer.measure([old], None, lambda: steps(old, new))  # all is known: nothing is rehearsed
        assert timed(timer, steps(new), new, confirmed=True) == pytest.approx([1.3 * 4096.0])
        return
    assert timed(timer, steps(new), new, confirmed=True) == pytest.approx([4096.0])
    assert [round(each.run_secs * 1e6) for each in timer.measure([old, other, new], None, lambda: known)] == [
        64,
        512,
        4096,
    ]


def test_graphs_are_held_against_the_one_that_told_their_reach(target):
    timer = MovingTimer(target, None, 1.0)
    model = CostModel(target, timer=timer)
    mod = detach(two_layers()).mod
    reach = model.reach(mod)
    model.cost(mod, reach=reach)
    assert timer.anchor is not None
    assert {step.key for step in timer.anchor()} == {kernel.key for kernel in model.kernels(mod, reach)}
    model.cost(detach(two_layers()).mod)  # held against nothing
    assert model.asked == 2


def test_a_second_time_is_not_fitted_to_the_first(target):
    """The first was of a moment that was twice as fast, of the whole graph: that tells nothing of the second."""
    a, b, c = (FakeKernel(add(2**i), name) for i, name in zip((6, 7, 8), "abc", strict=True))
    timer = MovingTimer(target, None, 0.5, 1.0)
    assert timed(timer, steps(a, b), a, b) == [32.0, 64.0]
    assert timed(timer, steps(a, b), a, b, confirmed=True) == [64.0, 128.0]
    timer = MovingTimer(target, None, 0.5, 1.0)
    assert timed(timer, steps(a, b), a, b) == [32.0, 64.0]
    assert timed(timer, steps(a, b, c), a, b, c) == [64.0, 128.0, 256.0]  # as it is where a kernel comes to them


def test_confirmed_in_another_rehearsal(target, tmp_path):
    """Of all kernels in it; nothing is measured a third time, here or by the next process."""
    a, b, c = (FakeKernel(add(2**i), name) for i, name in zip((6, 8, 9), "abc", strict=True))
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        timer = MovingTimer(target, database, 1.0)
        kinds = iter([0.5] * 3 + [2.0] * 3)
        timer.kind = lambda features: next(kinds) if features["flops"] == 64 else 1.0
        assert timed(timer, steps(a, b), a, b) == [32.0, 256.0]
        assert (timer.measured, timer.revision) == (2, 0)
        assert timed(timer, steps(a, b, c), c) == pytest.approx([512.0])  # the others' second times with it
        assert timed(timer, steps(a, b), a, b, confirmed=True) == pytest.approx([128.0, 256.0])
        assert (timer.measured, timer.revision) == (3, 2)
        timer.kind = lambda features: 1.8
        assert timed(timer, steps(a, b), a, b, confirmed=True) == pytest.approx([128.0, 256.0])
        # a slow moment, as the confirmed ones tell
        assert timed(timer, steps(a, b, c), c, confirmed=True) == pytest.approx([512.0], rel=0.03)
        later = MovingTimer(target, database, 5.0)
        assert timed(later, steps(a, b, c), a, b, c, confirmed=True) == pytest.approx([128.0, 256.0, 512.0], rel=0.03)
        assert (later.measured, later.revision) == (0, 0)


def test_kernels_alone_are_confirmed_too(target, tmp_path):
    kernels = [FakeKernel(add(8), "k"), FakeKernel(matmul(4, 4, 4), "m")]
    with KernelDatabase(tmp_path / "k.sqlite") as database:
        timer = MovingTimer(target, database, 1.0)
        first = timer.measure(kernels)
        assert [each.confirmed for each in first] == [False, False]
        timer.kind = lambda features: 2.0
        second = timer.measure(kernels, confirmed=True)
        assert [each.confirmed for each in second] == [True, True]
        assert [each.run_secs for each in second] == [2 * each.run_secs for each in first if each.run_secs]
        assert timer.measure(kernels) == second
        assert (timer.measured, timer.revision) == (2, 2)


def test_a_graphs_cost_follows(target):
    """It is for good where it was asked for so, and else until one of its kernels is measured again."""
    mod = detach(two_layers()).mod
    timer = MovingTimer(target, None, 1.0)
    model = CostModel(target, timer=timer)
    first = model.cost(mod)
    assert (first.single, first.confirmed) == (2, False)
    assert model.cost(mod) is first
    timer.kind = lambda features: 1.8
    second = model.cost(mod, confirmed=True)
    assert (second.single, second.confirmed) == (0, True)
    assert second.run_secs - second.launch_secs == pytest.approx(1.8 * (first.run_secs - first.launch_secs))
    assert model.cost(mod) is second
    assert (model.asked, model.misses, model.measured) == (4, 1, 1)


def test_a_graph_that_failed_here_is_priced_where_others_could_measure_it(target, tmp_path):
    mod, path = detach(two_layers()).mod, tmp_path / "k.sqlite"
    with KernelDatabase(path) as database, KernelDatabase(path) as another:
        with KernelTimer(target, database) as timer, MovingTimer(target, another, 1.0) as others:
            timer._workers = Ending("rehearse", KILLED, KILLED)
            model = CostModel(target, timer=timer)
            assert model.cost(mod).failed
            priced = CostModel(target, timer=others).cost(mod)
            timer.refresh()
            assert model.cost(mod) == priced
            assert math.isfinite(priced.run_secs)


def test_a_graph_whose_kernels_fail_the_second_time_has_no_confirmed_cost(target):
    """Its first stays what it is, and the next time it is asked for so, it is measured again."""
    mod = detach(two_layers()).mod
    with KernelTimer(target) as timer:
        timer._workers = Ending("rehearse")
        model = CostModel(target, timer=timer)
        first = model.cost(mod)
        timer._workers.ends += [KILLED, KILLED]
        second = model.cost(mod, confirmed=True)
        assert second.run_secs == math.inf
        assert "failed when it was measured again" in second.failed[0]
        assert model.cost(mod) == first
        assert model.cost(mod, confirmed=True).confirmed


@pytest.mark.parametrize(
    ("first", "second", "stands"), [(1.0, 2.0, 1.0), (2.0, 2.0, 7.0), (2.0, 1.0, 7.0), (None, 1.0, 7.0)]
)
def test_a_disturbed_second_time_does_not_take_an_undisturbed_ones_place(first, second, stands):
    times = KnownTimes("t", None)
    for run_secs, slowdown in ((1.0, first), (7.0, second)):
        times.learn("a", "v", Measurement(run_secs=run_secs, repeats=5, slowdown=slowdown))
    known = times._known["a", "v"]
    assert (known.run_secs, known.confirmed) == (stands, True)


def test_of_the_first_graph_the_middle_time_counts(target):
    """Of three moments, as nothing tells which is calm; and it stands where it was asked for as confirmed."""
    kernel = FakeKernel(add(64), "k")
    timer = MovingTimer(target, None, 1.3, 0.9, 1.0)
    assert timed(timer, steps(kernel), kernel, confirmed=True) == pytest.approx([64.0])
    assert timer.lookup(kernel, in_graph=True).confirmed
    assert timed(timer, steps(kernel), kernel, confirmed=True) == pytest.approx([64.0])
    assert (timer.measured, timer.revision) == (1, 0)


def test_of_a_graph_that_is_reckoned_by_the_anchor_the_middle_time_counts(target):
    """Each of three times is reckoned by what the anchor takes right after it."""
    old, new = FakeKernel(add(64), "old"), FakeKernel(add(4096), "new")
    timer = MovingTimer(target, None, *[1.0] * 3, *[1.3, 1.3], *[2.0, 1.0], *[0.5, 1.0])
    timer.anchor = lambda: steps(old)
    assert timed(timer, steps(old), old, confirmed=True) == [64.0]
    assert timed(timer, steps(new), new) == pytest.approx([4096.0])


def test_what_was_disturbed_does_not_stand_at_once():
    times = KnownTimes("t", None)
    for name, slowdown in (("calm", 1.0), ("loud", 2.0)):
        times.learn(name, "1", Measurement(run_secs=1.0, repeats=7, slowdown=slowdown), stands=True)
        assert times[FakeKernel(add(4), name), "1"].confirmed == (name == "calm")
    times.learn("bad", "1", BAD, stands=True)
    assert times[FakeKernel(add(4), "bad"), "1"] == BAD
