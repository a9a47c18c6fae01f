"""Making an environment with costs read off the graph, and choosing actions in it."""

from __future__ import annotations

import math

import numpy as np
from fake_cost import FakeCostModel
from small_models import LANES, conv_net

from rlflow_tvm.envs import GraphRewriteEnv, RewriteProblem
from rlflow_tvm.envs.rewards import Reward
from rlflow_tvm.passes import RuleSet, default_rules


def make_env(
    mod=None,
    horizon: int = 200,
    rules: RuleSet | None = None,
    limit: float = math.inf,
    reward: str | Reward = "relative",
    **cost,
) -> GraphRewriteEnv:
    mod = conv_net() if mod is None else mod
    problem = RewriteProblem(mod, FakeCostModel(**cost), rules or default_rules(LANES))
    return GraphRewriteEnv(problem=problem, horizon=horizon, limit=limit, reward=reward)


def legal_actions(observation) -> list[tuple[int, int]]:
    """Everything that the masks allow except stop, in order."""
    pairs = np.argwhere(observation["location_mask"][:-1])
    return [(int(rule), int(location)) for rule, location in pairs]


def random_legal(observation, rng: np.random.Generator) -> np.ndarray:
    actions = legal_actions(observation)
    return np.array(actions[int(rng.integers(len(actions)))])


def rule_action(env: GraphRewriteEnv, rule: str, location: int = 0) -> np.ndarray:
    return np.array([env.rule_names.index(rule), location])


def stop_action(env: GraphRewriteEnv) -> np.ndarray:
    return np.array([env.stop, 0])
