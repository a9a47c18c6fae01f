"""What is known of a kernel: its first time, the second that stands, and the speed that both are reckoned to."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from cost_kernels import FakeKernel, add, matmul, two_layers
from test_cost_graph_timer import MovingTimer
from test_cost_rehearsal import KILLED, Ending

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement
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


def test_what_was_disturbed_does_not_stand_at_once():
    times = KnownTimes("t", None)
    for name, slowdown in (("calm", 1.0), ("loud", 2.0)):
        times.learn(name, "1", Measurement(run_secs=1.0, repeats=7, slowdown=slowdown), stands=True)
        assert times[FakeKernel(add(4), name), "1"].confirmed == (name == "calm")
    times.learn("bad", "1", BAD, stands=True)
    assert times[FakeKernel(add(4), "bad"), "1"] == BAD
