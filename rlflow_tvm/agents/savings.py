"""What steps save: what is known of places, and what M foresees in place of rewards.

A reward such as the improvement on an episode's best graph depends on what came before; what a step saves does not. It
is told in percent of the episode's first graph and squeezed by a symmetric logarithm (as DreamerV3 does, Hafner et al.
2023), for a single bad kernel can cost more than all good moves save together.
"""

from __future__ import annotations

import numpy as np
import torch

from rlflow_tvm.agents.rollout import Episode
from rlflow_tvm.errors import AgentError

UNIT = 0.1
"""Percent; savings below it are told as they are, larger ones by their logarithm."""
MOST = 100.0
"""Percent: no step of a dream saves or costs more."""
SAVING_SHARE = 0.1
"""Of a dream's rewards, what the step itself saves; the rest is for what it improves on the best."""


def savings(episode: Episode) -> np.ndarray:
    """100 (RT(t-1) - RT(t)) / RT(0) of each step, float32 (T,), of a first graph that is free nothing; AgentError where
    the environment told no times."""
    if len(episode.run_secs) != len(episode) + 1:
        raise AgentError("savings: the environment must tell run_secs, finite, in each step's info")
    secs = np.asarray(episode.run_secs)
    if secs[0] == 0.0:
        return np.zeros(len(episode), np.float32)
    return (100.0 * (secs[:-1] - secs[1:]) / secs[0]).astype(np.float32)


def worth(episode: Episode, limit: float) -> float:
    """What the whole episode pays by `envs.rewards.ImprovementReward`, whatever its environment's reward is: dreams pay
    no other. `limit`: of a graph's cost over that of the first, beyond which the environment counts no more. AgentError
    as `savings`'."""
    saved = np.maximum(np.cumsum(savings(episode), dtype=np.float64), 100.0 * (1.0 - limit))
    return float((1.0 - SAVING_SHARE) * max(0.0, saved.max()) + SAVING_SHARE * saved[-1])


def squeezed(values: torch.Tensor) -> torch.Tensor:
    """sign(x) log(1 + |x| / UNIT)."""
    return values.sign() * (values.abs() / UNIT).log1p()


def stretched(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `squeezed`, in percent, at most MOST of either sign."""
    return (values.sign() * values.abs().expm1() * UNIT).clamp(-MOST, MOST)
