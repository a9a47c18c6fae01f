"""Gymnasium environments over rewriting and costs."""

from __future__ import annotations

from rlflow_tvm.envs.many_models import ManyModelsEnv
from rlflow_tvm.envs.problem import RewriteProblem
from rlflow_tvm.envs.rewards import REWARDS
from rlflow_tvm.envs.rewriting import GraphRewriteEnv

__all__ = ["REWARDS", "GraphRewriteEnv", "ManyModelsEnv", "RewriteProblem"]
