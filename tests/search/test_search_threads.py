"""An agent's search leaves torch's threads as they were."""

from __future__ import annotations

import pytest
import torch

from rlflow_tvm import superoptimize
from rlflow_tvm.passes import CATALOGUE
from rlflow_tvm.search.agent_search import AgentSearch


class Untrained:
    """What `agent_search` reads of an agent, and of its kind."""

    metadata = {"rules": [rule.name for rule in CATALOGUE], "horizon": 5}  # noqa: RUF012
    environment = "rewriting"

    def load(self, path, space):
        return self


class Interrupted(Exception):
    pass


def test_one_thread_while_searching_and_the_callers_number_afterwards(monkeypatch):
    seen = []

    def run(self, problem, progress=None):
        seen.append(torch.get_num_threads())
        raise Interrupted

    monkeypatch.setattr("rlflow_tvm.agents.kind_in", lambda path: Untrained())
    monkeypatch.setattr(AgentSearch, "run", run)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        search = superoptimize.agent_search("agent.safetensors")
        assert torch.get_num_threads() == 3
        with pytest.raises(Interrupted):
            search.run(None)
        assert seen == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
