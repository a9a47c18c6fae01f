"""A search that goes by invented times, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm
from invented import invented

import rlflow_tvm as rl
from rlflow_tvm.cost import CostModel, KernelDatabase, default_path
from rlflow_tvm.envs import RewriteProblem
from rlflow_tvm.kernels import as_target
from rlflow_tvm.search import Budget, SearchResult, make_search

TARGET = as_target("llvm")
BUDGET = "40"


@pytest.fixture(scope="module", autouse=True)
def invented_times(package_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with invented(package_home, tmp_path_factory.mktemp("invented")):
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
