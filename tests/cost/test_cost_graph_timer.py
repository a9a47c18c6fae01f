"""Graphs in turn: moments that are uneasy, the anchor, and what kernels are reckoned to."""

from __future__ import annotations

import itertools

import pytest
from cost_kernels import FakeKernel, add, two_layers
from fake_workers import workers_by
from test_cost_rehearsal import steps

from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, graph_timer
from rlflow_tvm.ir import detach

pytestmark = pytest.mark.usefixtures("patience")


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
