"""What all tests share: a home folder of their own, so that neither measurements nor models of the user are touched."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import onnx
import pytest

from rlflow_tvm.cost import bench, end_to_end, graph_timer, learned
from rlflow_tvm.cost.calibration import PATIENCE
from rlflow_tvm.frontend.net import Net

# What a training ends at may hang on the rounding of a sum, and so on the processor's vectors: these are what all of
# them have. Read when torch first computes.
os.environ |= {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}

USUAL_BURST_SECS = end_to_end._BURST_SECS
_YOUNG = 20_000
"""Objects that are made before garbage is looked for among them."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end, hundreds of thousands of objects: it is not looked through for
    garbage again and again, which took a twentieth of the tests' time and a quarter of their collection's. What else
    is made lives long, modules and graphs: it is looked through less often than usual."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, 10, 10)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that is last is one of few but long tests, for which the other process would wait: it goes first."""
    items.sort(key=lambda item: item.path.name != "test_wheel.py")


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_other_files() -> Iterator[None]:
    """What a file's tests leave is not held until the garbage of others makes it be found."""
    yield
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def package_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`$RLFLOW_TVM_HOME` for the session. Evaluation models in it are built once for all processes of the session."""
    home, shared = tmp_path_factory.mktemp("home"), tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    models = shared / "zoo"
    models.mkdir(exist_ok=True)
    (home / "zoo").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLFLOW_TVM_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def no_pause() -> Iterator[None]:
    """Beside other tests no moment is calm: nobody waits for one, here or in the processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PATIENCE, "0")
        for module in (bench, graph_timer):
            patch.setattr(module, "_PAUSE_SECS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_bursts() -> Iterator[None]:
    """What is stated of whole modules' times is stated of any: they are run a tenth as long, each in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(end_to_end, "_BURST_SECS", USUAL_BURST_SECS / 10)
        patch.setattr(end_to_end, "_ROUNDS_A_PROCESS", None)
        yield


@pytest.fixture
def usual_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole modules are run for as long as for users."""
    monkeypatch.setattr(end_to_end, "_BURST_SECS", USUAL_BURST_SECS)


@pytest.fixture(scope="session", autouse=True)
def little_ahead_of_torch_compile() -> Iterator[None]:
    """For the few small models that torch compiles here it starts no processes, precompiles no headers, and takes the
    compiler to know the processor's vectors, which it would try out for each new folder of what is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        patch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        yield


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured in an uneasy moment is tried again, as usual."""
    monkeypatch.delenv(PATIENCE)


@pytest.fixture
def quick_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cost models of few and small trees, where it does not matter how well they have learned."""
    monkeypatch.setattr(learned, "_MEMBERS", 4)
    monkeypatch.setattr(learned, "_ROUNDS", 40)


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network of few kernels: a residual and a fire block, a pool and a head."""
    net = Net(0)
    x = net.conv_relu("image", 3, 16, 3, stride=2)
    x = net.fire(net.max_pool(net.residual(x, 16)), 16, 8, 16)
    net.dense(net.global_average(x), 32, 10, "logits")
    path = tmp_path_factory.mktemp("network") / "network.onnx"
    onnx.save(net.model("small", {"image": (onnx.TensorProto.FLOAT, (1, 3, 32, 32))}, {"logits": (1, 10)}), path)
    return path
