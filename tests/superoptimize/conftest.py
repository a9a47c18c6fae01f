"""A search that goes by invented times, and what it finds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import tvm
from fake_workers import workers_by

import rlflow_tvm as rl
from rlflow_tvm.cost import CostModel, KernelDatabase, default_path, timer
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.kernels import as_target
from rlflow_tvm.search import Budget, SearchResult, make_search

TARGET = as_target("llvm")
BUDGET = "40"


@pytest.fixture(scope="module", autouse=True)
def invented_times(package_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a search goes by: kernels take times that have nothing to do with what they do. In a home of their own."""
    home = tmp_path_factory.mktemp("invented")
    (home / "zoo").symlink_to(package_home / "zoo")

    def secs(features: Mapping[str, float], _cold: str) -> float:
        return 1e-6 * (1.0 + zlib.crc32(repr(sorted(features.items())).encode()) / 2**32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLFLOW_TVM_HOME", str(home))
        patch.setattr(timer, "LocalWorkers", workers_by(secs))
        yield


@pytest.fixture(scope="module")
def mod(network: Path) -> tvm.IRModule:
    return rl.from_onnx(network)


@pytest.fixture(scope="module")
def cost_model() -> Iterator[CostModel]:
    with KernelDatabase(default_path()) as database, CostModel(TARGET, database) as model:
        yield model


@pytest.fixture(scope="module")
def found(mod: tvm.IRModule, cost_model: CostModel) -> SearchResult:
    return make_search("family", budget=Budget.parse(BUDGET)).run(RewriteProblem(mod, cost_model))
