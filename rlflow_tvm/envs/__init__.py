"""Gymnasium environments over rewriting and costs.

Importing this registers the rewriting environments: `gymnasium.make("rlflow_tvm.envs:rlflow_tvm/GraphRewrite-v0", ...)`
imports it by itself; X-RLflow's is `rlflow_tvm/Candidates-v0`, the one of passes `rlflow_tvm/PassOrdering-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rlflow_tvm.envs.candidates import CandidateEnv
from rlflow_tvm.envs.episode import RewritingEnv
from rlflow_tvm.envs.many_models import ManyModelsEnv
from rlflow_tvm.envs.pass_ordering import PassOrderingEnv
from rlflow_tvm.envs.problem import Beginning, RewriteProblem
from rlflow_tvm.envs.rewards import REWARDS
from rlflow_tvm.envs.rewriting import GraphRewriteEnv

gymnasium.register(id="rlflow_tvm/GraphRewrite-v0", entry_point="rlflow_tvm.envs:GraphRewriteEnv")
gymnasium.register(id="rlflow_tvm/Candidates-v0", entry_point="rlflow_tvm.envs:CandidateEnv")
gymnasium.register(id="rlflow_tvm/PassOrdering-v0", entry_point="rlflow_tvm.envs:PassOrderingEnv")

ENVIRONMENTS: dict[str, type[RewritingEnv[Any]]] = {"rewriting": GraphRewriteEnv, "candidate": CandidateEnv}
"""By the names that agents know them by."""

__all__ = [
    "Beginning",
    "ENVIRONMENTS",
    "REWARDS",
    "CandidateEnv",
    "GraphRewriteEnv",
    "ManyModelsEnv",
    "PassOrderingEnv",
    "RewriteProblem",
    "RewritingEnv",
]
