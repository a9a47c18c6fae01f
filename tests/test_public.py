"""The public face as a user's script holds on to it: passes in a pipeline, plans, costs, the environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import tvm
from invented import invented
from tvm import relax

import rlflow_tvm as rl
from rlflow_tvm import errors, superoptimize
from rlflow_tvm.cost import CostModel, KernelDatabase, KernelTimer, Measurement, RpcDevices, default_path, timer
from rlflow_tvm.cost.kernel_worker import LocalWorkers
from rlflow_tvm.differences import range_error
from rlflow_tvm.errors import CostError, PlanError, UsageError
from rlflow_tvm.frontend import onnxruntime_outputs, random_inputs, zoo
from rlflow_tvm.kernels import as_target, explain, extract_kernels
from rlflow_tvm.search import Budget, make_search
from rlflow_tvm.superoptimize import optimize
from rlflow_tvm.verify import run_module

TARGET = as_target("llvm")
BUDGET = "40"


@pytest.fixture(scope="module", autouse=True)
def invented_times(package_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with invented(package_home, tmp_path_factory.mktemp("invented")):
        yield


@pytest.fixture
def real_times(package_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are measured after all."""
    monkeypatch.setenv("RLFLOW_TVM_HOME", str(package_home))
    monkeypatch.setattr(timer, "LocalWorkers", LocalWorkers)


@pytest.fixture(scope="module")
def mod(network):
    return rl.from_onnx(network)


@pytest.fixture(scope="module")
def found(mod):
    with KernelDatabase(default_path()) as database, CostModel(TARGET, database) as cost_model:
        return optimize(mod, make_search("family", budget=Budget.parse(BUDGET)), cost_model)


def outputs(executable, inputs) -> list[np.ndarray]:
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs.values()))
    return [result.numpy()] if isinstance(result, tvm.runtime.Tensor) else [tensor.numpy() for tensor in result]


def test_superoptimize_is_a_pass_that_keeps_the_outputs(mod, found, network):
    # the kernels' times are in the database since `found`
    told = []
    superoptimize = rl.Superoptimize(
        TARGET, search="family", budget=BUDGET, progress=lambda *how_far: told.append(how_far)
    )
    assert isinstance(superoptimize, tvm.transform.Pass)
    assert superoptimize.result is None
    optimized = tvm.transform.Sequential([superoptimize])(mod)
    tvm.ir.assert_structural_equal(rl.ApplyPlan(superoptimize.result.plan)(mod)["main"], optimized["main"])
    result = superoptimize.result
    # times are invented: it may be the model itself that is left, as the faster one
    assert result.run_secs_after == (told[-1][-1] if result.plan.actions else result.run_secs_before)
    inputs = random_inputs(mod, 1)
    expected = onnxruntime_outputs(str(network), inputs)
    assert range_error(run_module(optimized, TARGET, list(inputs.values())), expected) < 1e-4
    assert found.run_secs_after < found.run_secs_before


def test_plan_repeats_the_search(mod, found, tmp_path):
    found.plan.save(tmp_path / "plan.json")
    repeated = rl.ApplyPlan(tmp_path / "plan.json")(mod)
    assert isinstance(rl.ApplyPlan(found.plan), tvm.transform.Pass)
    tvm.ir.assert_structural_equal(repeated["main"], found.state.bound()["main"])
    with pytest.raises(PlanError, match="another module"):
        rl.ApplyPlan(found.plan)(rl.from_onnx(zoo.path("light_squeezenet")))


def test_every_way_to_build_gives_the_same(mod, network):
    inputs = random_inputs(mod, 2)
    expected = onnxruntime_outputs(str(network), inputs)
    with TARGET:
        registered = relax.get_pipeline("rlflow")
    for executable in (
        rl.compile(mod, TARGET),
        tvm.compile(mod, TARGET, relax_pipeline=rl.pipeline(TARGET)),
        tvm.compile(mod, TARGET, relax_pipeline=registered),
    ):
        assert range_error(outputs(executable, inputs), expected) < 1e-4


@pytest.mark.parametrize("kind", [errors.UncomparableError, errors.KernelError, errors.Ended])
def test_an_error_of_a_pass_comes_out_as_it_went_in(mod, kind):
    @tvm.transform.module_pass(opt_level=0)
    def fails(module, context):
        raise kind(3)

    with pytest.raises(kind):
        fails(mod)


def test_compile_makes_no_database(mod, tmp_path):
    path = tmp_path / "folder" / "kernels.sqlite"
    with pytest.raises(CostError, match=r"kernels\.sqlite: no such kernel database") as raised:
        rl.compile(mod, TARGET, database=path)
    assert "\n" not in str(raised.value)
    assert not path.parent.exists()


def test_that_a_database_has_no_times_for_the_target_is_told(tmp_path, caplog):
    """As where a search ran under taskset and the build does not."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((4, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.tanh(x))
        builder.emit_func_output(output)
    one, two = ({"kind": "llvm", "num-cores": cores} for cores in (1, 2))
    with KernelDatabase(tmp_path / "kernels.sqlite") as database:
        rl.compile(builder.get(), one, database=database.path)
        assert "holds no times for" in caplog.text
        assert "search again" in caplog.text
        with KernelTimer(as_target(two), database) as timer:
            database.put("a", timer.target_key, timer.graph_version, Measurement(run_secs=1.0))
        caplog.clear()
        rl.compile(builder.get(), two, database=database.path)
        assert not caplog.text
        rl.compile(builder.get(), one, database=database.path)
        assert "num-cores=2" in caplog.text


def test_a_gpus_times_are_not_found_without_it(mod, tmp_path, monkeypatch):
    """They are kept by its name."""
    with KernelDatabase(tmp_path / "kernels.sqlite") as database:
        monkeypatch.setattr(tvm, "cuda", lambda: SimpleNamespace(exist=False))
        with pytest.raises(CostError, match="leave out database") as raised:
            rl.compile(mod, {"kind": "cuda", "arch": "sm_90"}, database=database.path)
    assert "\n" not in str(raised.value)


def test_graph_cost_gives_every_metric(mod, real_times):
    cost = rl.graph_cost(mod, TARGET)
    assert 0 < cost.launch_secs < cost.run_secs
    assert min(cost.kernels, cost.flops, cost.bytes_moved, cost.peak_bytes) > 0


def test_environment_is_registered(mod):
    env = gymnasium.make("rlflow_tvm.envs:rlflow_tvm/GraphRewrite-v0", mod=mod, target=TARGET, disable_env_checker=True)
    observation, info = env.reset(seed=0)
    assert info["run_secs"] == env.unwrapped.run_secs
    assert observation["rule_mask"][env.unwrapped.stop] == 1
    assert len(env.unwrapped.plan) == 0
    env.close()


def test_the_target_is_the_one_that_tvm_compiles_for(mod, found, monkeypatch):
    """As with `pipeline()`."""
    asked = []

    def noted(target, *arguments, **options):
        asked.append(target)
        raise CostError("enough is known")

    monkeypatch.setattr(superoptimize, "CostModel", noted)
    other = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "num-cores": 1})
    with other, pytest.raises(CostError, match="enough"):
        rl.Superoptimize()(mod)
    with pytest.raises(CostError, match="enough"):
        rl.Superoptimize()(mod)
    with other, pytest.raises(CostError, match="enough"):
        rl.Superoptimize(TARGET)(mod)
    assert [str(target) for target in asked] == [str(other), str(TARGET), str(TARGET)]


def test_a_bare_name_means_this_machine_to_prices_too(mod, real_times):
    """Measured for another target, seconds would not be the same to the last digit; invented ones might."""
    here = rl.graph_cost(mod, TARGET)
    assert here.run_secs == rl.graph_cost(mod, "llvm").run_secs
    assert here.run_secs == rl.graph_cost(mod, tvm.target.Target("llvm")).run_secs
    assert explain(mod, "llvm") == explain(mod, TARGET)
    assert [kernel.key for kernel in extract_kernels(mod, "llvm")] == [row.key for row in explain(mod, TARGET)]
    with CostModel("llvm") as cost_model:
        assert str(cost_model.target) == str(cost_model.timer.target) == str(TARGET)
    with pytest.raises(UsageError, match="abacus"):
        CostModel("abacus")


def test_a_plan_for_other_vectors_is_told_of(mod, found, caplog):
    lanes = found.plan.lanes
    for cpu, told in (("x86-64", True), (TARGET.attrs["mcpu"], False)):
        caplog.clear()
        with tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": 1}):
            rewritten = rl.ApplyPlan(found.plan)(mod)
        assert (f"for processors with {lanes} floats a vector, the target has 4" in caplog.text) == told
        tvm.ir.assert_structural_equal(rewritten["main"], found.state.bound()["main"])


def test_unknown_names_are_refused():
    with pytest.raises(UsageError, match="no search"):
        rl.Superoptimize(TARGET, search="clever")
    with pytest.raises(UsageError, match="seed -1"):
        rl.Superoptimize(TARGET, agent="no.safetensors", seed=-1)
    with pytest.raises(UsageError, match="abacus"):
        rl.Superoptimize("abacus")
    with pytest.raises(AttributeError, match="nothing"):
        _ = rl.nothing


@pytest.mark.parametrize("body", ["parameter", "view"])
def test_superoptimize_leaves_a_module_alone_that_computes_nothing(body: str) -> None:
    x = tvm.relax.Var("x", tvm.relax.TensorType((2, 3), "float32"))
    builder = tvm.relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(x if body == "parameter" else tvm.relax.op.reshape(x, (3, 2)))
        builder.emit_func_output(output)
    mod = builder.finalize()
    superoptimize = rl.Superoptimize(TARGET)
    tvm.ir.assert_structural_equal(superoptimize(mod), mod)
    plan = superoptimize.result.plan
    assert len(plan) == 0
    tvm.ir.assert_structural_equal(rl.ApplyPlan(plan)(mod)["main"].body, mod["main"].body)
    assert superoptimize.result.run_secs_after == 0.0
    assert default_path().is_file()  # as after any search: `rl.compile(database=default_path())` finds it


def test_superoptimize_rewrites_main():
    x = tvm.relax.Var("x", tvm.relax.TensorType((2, 3), "float32"))
    builder = tvm.relax.BlockBuilder()
    with builder.function("entry", [x]):
        with builder.dataflow():
            output = builder.emit_output(tvm.relax.op.nn.relu(x))
        builder.emit_func_output(output)
    with pytest.raises(UsageError, match="the module has no function main") as raised:
        rl.Superoptimize(TARGET)(builder.finalize())
    assert "\n" not in str(raised.value)


def test_outputs_are_compared_here_whatever_machines_were_measured_on(monkeypatch):
    compared_for: list[tvm.target.Target] = []
    compared_with = []

    def check_state(_state, target, choices=None):
        compared_for.append(target)
        compared_with.append(choices)

    monkeypatch.setattr(superoptimize, "RewriteProblem", lambda *_: None)
    monkeypatch.setattr(superoptimize, "check_state", check_state)
    result = SimpleNamespace(state=SimpleNamespace(actions=("one",)))
    search = SimpleNamespace(run=lambda *_: result)
    device = as_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72", "num-cores": 4})
    with CostModel(device, remote=RpcDevices("tracker", 9190, "board")) as cost_model:
        assert optimize(None, search, cost_model) is result
    with CostModel(TARGET) as cost_model:
        optimize(None, search, cost_model)
    assert [str(target) for target in compared_for] == [str(as_target(None)), str(TARGET)]
    assert compared_with == [None, cost_model.choices]
