"""Gives the agents' tests their toy environment, random observations and a small policy."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from copied_workers import SUBPROCESS

from rlflow_tvm.agents import processes
from rlflow_tvm.agents.observation import CompactObservation, ObservationSizes
from rlflow_tvm.agents.policy import TwoStepPolicy


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The module `toy_env` beside this file, whatever pytest's import mode."""
    spec = importlib.util.spec_from_file_location("toy_env", Path(__file__).with_name("toy_env.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_env"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The tensors here are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copied_workers(monkeypatch) -> None:
    """Rollout workers are copies of a process that has imported what they need."""
    monkeypatch.setattr(processes, "subprocess", SUBPROCESS)


RandomObservation = Callable[..., CompactObservation]


@pytest.fixture(scope="session")
def sizes() -> ObservationSizes:
    """Sizes with nothing in common with the toy's."""
    return ObservationSizes(
        num_operators=7,
        node_features=3,
        edge_features=2,
        num_rules=6,
        num_locations=12,
        nodes_per_location=4,
        keys_per_location=2,
    )


@pytest.fixture(scope="session")
def random_observation(sizes) -> RandomObservation:
    """A maker of random observations of those sizes: (rng, nodes=8, edges=10, sites=9)."""

    def make(rng: np.random.Generator, nodes: int = 8, edges: int = 10, sites: int = 9) -> CompactObservation:
        features = rng.normal(size=(nodes, sizes.node_features + 1)).astype(np.float32)
        features[:, 0] = rng.integers(0, sizes.num_operators, nodes)
        # some of the (rule, location) pairs below stop, and stop itself
        pairs = sorted(rng.permutation(sizes.stop_rule * sizes.num_locations)[:sites])
        rules = np.array([pair // sizes.num_locations for pair in pairs] + [sizes.stop_rule], dtype=np.int16)
        locations = np.array([pair % sizes.num_locations for pair in pairs] + [0], dtype=np.int16)
        members = np.array([rng.integers(-1, nodes, sizes.nodes_per_location) for _ in pairs], dtype=np.int32)
        return CompactObservation(
            nodes=features,
            edges=rng.normal(size=(edges, sizes.edge_features)).astype(np.float32),
            edge_links=rng.integers(0, nodes, (edges, 2)).astype(np.int32),
            site_rules=rules,
            site_locations=locations,
            site_nodes=np.concatenate([members.reshape(-1, 4), np.full((1, 4), -1)]).astype(np.int32),
            site_places=np.concatenate([rng.integers(1, 99, (len(pairs), 2)), np.zeros((1, 2))]).astype(np.int64),
            site_known=rng.normal(size=(len(pairs) + 1, sizes.num_known)).astype(np.float32),
        )

    return make


@pytest.fixture
def policy(sizes) -> TwoStepPolicy:
    """A small policy whose heads are not yet flattened, so that its probabilities differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = TwoStepPolicy(sizes, hidden=16, rounds=2)
        for head in (made.heads.location_head, made.heads.rule_head):
            torch.nn.init.normal_(head.weight)
    return made
