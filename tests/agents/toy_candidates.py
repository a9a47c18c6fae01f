"""The toy chain as a candidate environment: each step shows all chains one rewrite away, by what they change."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from toy_env import COST, RULES, ToyRewriteEnv, rewrite, sites

from rlflow_tvm.envs.places import place_keys


class ToyCandidateEnv(gymnasium.Env):
    """Action: the number of a candidate, `most` to stop; `order`, if given, permutes the candidates.

    Everything else is `ToyRewriteEnv`'s, whose arguments `options` are.
    """

    def __init__(self, most: int = 24, order: Any = None, **options: Any) -> None:
        self.chain, self.most, self.order = ToyRewriteEnv(**options), most, order
        self.observation_space = spaces.Dict(
            {
                "graph": self.chain.observation_space["graph"],
                "node_candidate": spaces.Sequence(spaces.Discrete(most + 1, start=-1), stack=True),
                "removed": spaces.Sequence(spaces.Box(0, 2**30, (2,), np.int32), stack=True),
                "candidate_mask": spaces.MultiBinary(most + 1),
                "candidate_rules": spaces.Box(-1, len(RULES), (most + 1,), np.int16),
                "candidate_places": spaces.Box(-(2**63), 2**63 - 1, (most + 1, 3), np.int64),
            }
        )
        self.action_space = spaces.Discrete(most + 1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        info = self.chain.begin(seed, options)
        return self._observation(), info

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        number, illegal = int(action), (len(RULES), 1)
        found = self._found[number] if number < len(self._found) else illegal
        rule, location = (len(RULES), 0) if number == self.most else found
        reward, terminated, truncated, info = self.chain.move((rule, location))
        return self._observation(), reward, terminated, truncated, info

    def _observation(self) -> dict[str, Any]:
        state = self.chain.state
        colours, bonds = state
        found = sites(state)
        self._found = [(rule, i) for rule, places in enumerate(found) for i in range(len(places))]
        if self.order is not None:
            self._found = [self._found[i] for i in self.order(len(self._found))]
        nodes = [(colour, COST[colour] / 11, 1.0) for colour in colours]
        links = [(i, i + 1) for i in range(len(bonds))]
        edges = [(bond, 1.0) for bond in bonds]
        owner, removed = [-1] * len(colours), []
        for number, (rule, location) in enumerate(self._found):
            site = found[rule][location]
            colour = rewrite(state, rule, site)[0][site[0]]
            removed += [(number, node) for node in site]
            nodes.append((colour, COST[colour] / 11, 1.0))
            owner.append(number)
            if site[0]:
                links.append((site[0] - 1, len(nodes) - 1))
                edges.append((bonds[site[0] - 1], 1.0))
            if site[-1] < len(bonds):
                links.append((len(nodes) - 1, site[-1] + 1))
                edges.append((bonds[site[-1]], 1.0))
        mask, rules = np.zeros(self.most + 1, np.int8), np.full(self.most + 1, -1, np.int16)
        mask[: len(self._found)] = mask[-1] = 1
        rules[: len(self._found)], rules[-1] = [rule for rule, _ in self._found], len(RULES)
        places = np.zeros((self.most + 1, 3), np.int64)
        if self._found:
            located = np.array([(*found[r][i], -1, -1, -1)[:4] for r, i in self._found])
            chain = np.array(links[: len(bonds)], np.int64).reshape(-1, 2)
            here = rules[: len(self._found)]
            places[: len(self._found)] = place_keys(np.array(colours, np.uint64), chain, here, located, radii=(0, 1))
        return {
            "graph": spaces.GraphInstance(
                np.array(nodes, np.float32),
                np.array(edges, np.float32).reshape(-1, 2),
                np.array(links, np.int64).reshape(-1, 2),
            ),
            "node_candidate": np.array(owner, np.int32),
            "removed": np.array(removed, np.int32).reshape(-1, 2),
            "candidate_mask": mask,
            "candidate_rules": rules,
            "candidate_places": places,
        }
