"""Gymnasium environments over rewriting and costs.

Importing this registers the rewriting environment: `gymnasium.make("rlflow_tvm.envs:rlflow_tvm/GraphRewrite-v0", ...)`
imports it by itself.
"""

from __future__ import annotations

import gymnasium

from rlflow_tvm.envs.many_models import ManyModelsEnv
from rlflow_tvm.envs.problem import RewriteProblem
from rlflow_tvm.envs.rewards import REWARDS
from rlflow_tvm.envs.rewriting import GraphRewriteEnv

gymnasium.register(id="rlflow_tvm/GraphRewrite-v0", entry_point="rlflow_tvm.envs:GraphRewriteEnv")

__all__ = ["REWARDS", "GraphRewriteEnv", "ManyModelsEnv", "RewriteProblem"]
