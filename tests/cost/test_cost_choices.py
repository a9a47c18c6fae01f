"""Choosing among implementations: the fastest is taken, known times suffice, the heuristic without them."""

from __future__ import annotations

import pytest
from tvm import relax

from rlflow_tvm.cost import KernelDatabase, MeasuredChoice, Measurement, target_key
from rlflow_tvm.cost.choices import REACH
from rlflow_tvm.kernels import Choice, Lowering, heuristic_choice
from rlflow_tvm.kernels.choice import Implementation


class TableTimer:
    """A timer's face over a table: the first kernel asked for by an implementation has its time."""

    database = None

    def __init__(self, target, known: dict[str, float | None]):
        self.target, self.known, self.asked = target, known, []

    def measure(self, kernels):
        self.asked += [kernel.key for kernel in kernels]
        return [self.lookup(kernel) for kernel in kernels]

    def lookup(self, kernel):
        secs = self.known.get(kernel.key, 1.0)
        return Measurement(error="lost", error_kind="crash") if secs is None else Measurement(run_secs=secs)


def product(target, *, cost: dict[str, float]) -> Choice:
    """A product with a weight in two forms: transposed within the kernel, and as it is."""

    def transposed(bb, call):
        left, right = call.args
        return bb.call_te(_product, left, right, primfunc_name_hint="turned")

    def plain(bb, call):
        return call.op.get_attr("FLegalize")(bb, call)

    options = tuple(
        Implementation(name, lambda *_: True, lambda _t, f=f: f, lambda *_, c=cost[name]: c)
        for name, f in (("turned", transposed), ("plain", plain))
    )
    left, right = (
        relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (3, 4)), ("w", (4, 5)))
    )
    call = relax.BlockBuilder().normalize(relax.op.matmul(left, right))
    return Choice(call, True, target, options)


def _product(left, right):
    from tvm import te

    k = te.reduce_axis((0, 4), "k")
    return te.compute((3, 5), lambda i, j: te.sum(right[k, j] * left[i, k], axis=k), name="turned")


@pytest.fixture
def two_forms(monkeypatch, target):
    """The choice, and the key of each form's kernel."""
    from rlflow_tvm.kernels import legalize

    choice = product(target, cost={"turned": 1.0, "plain": 2.0})
    monkeypatch.setattr(legalize, "IMPLEMENTATIONS", {"llvm": {"relax.matmul": choice.options}})
    keys = {
        option.name: Lowering(target, lambda _c, n=option.name: n).kernels(choice.module())[0].key
        for option in choice.options
    }
    assert len(set(keys.values())) == 2
    return choice, keys


@pytest.mark.parametrize(
    ("turned", "plain", "taken"),
    [
        (2.0, 1.0, "plain"),
        (1.0, 2.0, "turned"),
        (1.0, 1.0, "turned"),  # the heuristic's
        (None, 1.0, "plain"),
        (None, None, "turned"),
    ],
)
def test_the_fastest_is_taken(two_forms, target, turned, plain, taken):
    choice, keys = two_forms
    timer = TableTimer(target, {keys["turned"]: turned, keys["plain"]: plain})
    assert MeasuredChoice(timer)(choice) == taken
    assert timer.asked == [keys["turned"], keys["plain"]]


def test_without_measuring_known_times_decide_and_else_the_heuristic(two_forms, target, tmp_path):
    from rlflow_tvm.cost import KernelTimer

    choice, keys = two_forms
    with KernelDatabase(tmp_path / "k.sqlite") as database, KernelTimer(target, database) as timer:
        remembered = MeasuredChoice(timer, measure=False)
        assert remembered(choice) == heuristic_choice(choice) == "turned"
        for name, secs in (("turned", 2.0), ("plain", 1.0)):
            measurement = Measurement(run_secs=secs, repeats=3, spread=0.0)
            # the input and the result are in the caches, the weight is not
            database.put(f"{keys[name]}/0{REACH}0", target_key(target), timer.version, measurement, "0.27")
        assert remembered(choice) == "plain"
        assert timer.measured == 0


def test_the_lowering_asks_once_for_equal_calls(two_forms, target):
    choice, keys = two_forms
    asked = []

    def choose(asking: Choice) -> str:
        asked.append((asking.weight, [option.name for option in asking.options]))
        return "plain"

    lowering = Lowering(target, choose)
    for _ in range(2):
        assert [kernel.key for kernel in lowering.kernels(choice.module())] == [keys["plain"]]
    assert asked == [(True, ["turned", "plain"])]
