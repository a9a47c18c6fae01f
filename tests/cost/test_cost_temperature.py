"""Where operands are found: small graphs worked out by hand, storage against TVM's own plan, caches prepared."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from cost_kernels import add, two_layers
from small_models import MODELS, TARGET, module
from tvm import relax
from tvm.relax import op as rx

from rlflow_tvm.cost import CostModel, Temperatures
from rlflow_tvm.cost.caches import Caches, LocalCaches, SentCaches, helpers
from rlflow_tvm.cost.memory import plan_memory
from rlflow_tvm.cost.metrics import kernel_buffers, tensor_bytes
from rlflow_tvm.cost.temperature import megabytes, operand_temperatures, private_bytes
from rlflow_tvm.ir import detach
from rlflow_tvm.kernels import Launch, Launches, Lowering

MB = 1 << 20


def launches(*operands: tuple[int, ...], inputs=(), weights=(), outputs=()) -> Launches:
    """Launches of one-element-type kernels over numbered tensors."""
    made = tuple(Launch(add(4), "k", "add", numbers) for numbers in operands)
    return Launches(made, frozenset(inputs), frozenset(weights), frozenset(outputs))


def temperatures(graph: Launches, size: dict[int, int], capacity: int, reach: int = 3, part: bool = False) -> list[str]:
    sizes = [tuple(size[number] for number in launch.operands) for launch in graph.launches]
    return operand_temperatures(graph, plan_memory(graph, sizes), sizes, capacity, reach, part)


def test_what_the_launch_before_wrote_is_warm_and_weights_are_not():
    # x(0) * w(1) -> a(2); a * w(3) -> b(4)
    graph = launches((0, 1, 2), (2, 3, 4), inputs=[0], weights=[1, 3], outputs=[4])
    size = dict.fromkeys(range(5), MB)
    assert temperatures(graph, size, capacity=4 * MB) == ["333", "033"]
    assert temperatures(graph, size, capacity=4 * MB, reach=5) == ["555", "055"]


def test_a_tensor_cools_down_while_others_are_touched():
    # a(1) is read at once, after one more launch, and after two more
    graph = launches((0, 1), (1, 2), (2, 3), (3, 4), (1, 4, 5), inputs=[0], outputs=[5])
    size = dict.fromkeys(range(6), MB)
    # between a's last two uses lie two launches of 2 MB each
    assert temperatures(graph, size, capacity=6 * MB)[4][0] == "0"
    assert temperatures(graph, size, capacity=4 * MB)[4][0] == "1"


def test_a_tensor_larger_than_the_caches_is_never_in_them():
    graph = launches((0, 1), (1, 2), inputs=[0], outputs=[2])
    assert temperatures(graph, {0: MB, 1: 9 * MB, 2: MB}, capacity=8 * MB) == ["33", "13"]


def test_a_result_takes_the_memory_of_a_tensor_that_is_read_no_more():
    # a(1) dies in the second launch; c(3) takes its storage, touched one launch ago
    graph = launches((0, 1), (1, 2), (2, 3), (3, 4), inputs=[0], outputs=[4])
    assert temperatures(graph, dict.fromkeys(range(5), MB), capacity=4 * MB) == ["33", "03", "00", "03"]


def test_a_part_of_a_graph_finds_all_but_weights_where_the_others_left_them():
    graph = launches((0, 1, 2), inputs=[0], weights=[1], outputs=[2])
    assert temperatures(graph, dict.fromkeys(range(3), MB), capacity=4 * MB, part=True) == ["030"]
    assert temperatures(graph, {0: 9 * MB, 1: MB, 2: MB}, capacity=4 * MB, part=True) == ["130"]


def test_a_graph_that_fits_the_caches_is_warm():
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    graph = launches((0, 1, 2), inputs=[0], weights=[1], outputs=[2])
    small = Temperatures(target)
    assert small.reach(graph) == 0
    assert [kernel.cold for kernel in small.kernels(graph)] == ["000"]
    assert [kernel.cold for kernel in small.kernels(graph, reach=4)] == ["444"]


@pytest.mark.parametrize(
    ("total", "digit"), [(6, 2), (9, 3), (15, 3), (16, 4), (40, 5), (81, 6), (221, 7), (300, 8), (9000, 8)]
)
def test_the_reach_is_the_sweep_nearest_to_thrice_what_is_touched(total, digit):
    target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
    assert private_bytes(target) < 6 * MB
    elements = total * MB // 4 // 3
    kernel = add(elements)
    graph = Launches((Launch(kernel, str(total), "add", (0, 1, 2)),), frozenset({0, 1}), frozenset(), frozenset({2}))
    assert Temperatures(target).reach(graph) == digit
    assert [megabytes(d) for d in (2, 3, 6, 8)] == [16, 32, 256, 1024]


def mixed():
    """Element types that share no storage, though what is free would fit."""

    def body(emit, x):
        y = emit(rx.nn.softmax(emit(rx.nn.softmax(x))))
        order = emit(rx.argsort(emit(rx.astype(y, "float16")), axis=1))
        return rx.nn.softmax(emit(rx.astype(emit(rx.cumsum(order, axis=1)), "float32")))

    return module({"x": (64, 64)}, {}, body)


@pytest.mark.parametrize("name", [*sorted(MODELS), "mixed"])
def test_storage_is_reused_as_in_tvms_plan(name):
    """As many pieces of storage, of the same sizes, as TVM's own pass allocates."""
    lowering = Lowering(TARGET)
    mod = detach({**MODELS, "mixed": mixed}[name]()).mod
    graph = lowering.launches(mod)
    buffers = [kernel_buffers(launch.func) for launch in graph.launches]
    sizes = [tuple(tensor_bytes(*buffer) for buffer in each) for each in buffers]
    plan, size = plan_memory(graph, sizes, [tuple(dtype for _, dtype in each) for each in buffers]), {}
    for launch, places, own in zip(graph.launches, plan.places, sizes, strict=True):
        for number, place, bytes_ in zip(launch.operands, places, own, strict=True):
            if number not in graph.inputs | graph.weights | graph.outputs:
                size[place] = max(bytes_, size.get(place, 0))
    passes = [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
    ]
    planned = tvm.transform.Sequential(passes)(lowering.lower(mod).mod)
    allocated = []
    for block in planned["main"].body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.Call) and getattr(value.op, "name", "") == "relax.memory.alloc_storage":
                allocated.append(int(value.args[0].values[0]))
    assert sorted(size.values()) == sorted(allocated)
    assert plan.storage_bytes == sum(allocated)


def test_one_kernel_at_two_temperatures_is_measured_twice(target, timer):
    model = CostModel(target, timer=timer)
    mod = detach(two_layers(width=56)).mod
    (first, second) = model.kernels(mod, reach=3)  # the second layer reads what the first has just written
    assert (first.key, first.cold, second.key, second.cold) == (second.key, "333", first.key, "033")
    far = model.cost(mod, reach=3)
    assert model.measured == 2
    assert model.cost(mod, reach=3) is far
    near = model.cost(mod)
    assert model.measured == 3
    assert {kernel.cold for kernel in model.kernels(mod)} == {"000"}
    assert near.run_secs > 0


@pytest.fixture(params=["local", "sent"])
def caches(request, target, tmp_path) -> Caches:
    if request.param == "local":
        return LocalCaches(target)
    library = tmp_path / "helpers.so"
    library.write_bytes(helpers(target))
    return SentCaches(target, tvm.runtime.load_module(str(library)))


def test_preparing_the_caches_leaves_operands_as_they_were(caches):
    prepare = tvm_ffi.get_global_func(caches.name)
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((3, 5, 7)).astype("float32"),
        rng.integers(-9, 9, (70,)).astype("int64"),
        rng.standard_normal((1, 1)).astype("float16"),
        np.array([[True, False] * 40]),
        np.full((130,), np.nan, "float32"),
        np.zeros((0, 4), "float32"),
    ]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    for cold in ("", "012012", "000000", "222222"):
        caches.set(cold)
        prepare(*tensors)
        for array, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(("cores", "swept"), [(2, 16), (8, 16), (9, 32), (32, 64)])
def test_a_sweep_leaves_no_core_its_private_cache(cores, swept, monkeypatch):
    """However many share it."""
    local, found = LocalCaches(tvm.target.Target({"kind": "llvm", "num-cores": cores})), []
    monkeypatch.setattr(local, "_sweep", found.append)
    local.set("10")
    local._prepare(*(tvm.runtime.tensor(np.zeros(64, "float32")) for _ in range(2)))
    assert [megabytes(digit) for digit in found] == [swept]
