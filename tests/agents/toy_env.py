"""A small rewriting environment with the spaces of the real one, and no compiler behind it.

A chain of coloured nodes joined by strong or weak bonds. Colours cost, rules repaint:

    paint: red -> green         gains 1
    heat:  red -> hot           loses 1
    fuse:  hot - hot -> gold    over a strong bond, gains 12; -> ash over a weak one, gains 3

So a greedy search paints everything (1 a node), while heating two nodes and fusing them over a strong bond gives 10.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlflow_tvm.envs.places import place_keys

RED, GREEN, HOT, GOLD, ASH = range(5)
COST = {RED: 6, GREEN: 5, HOT: 7, GOLD: 2, ASH: 11}
RULES = ("paint", "heat", "fuse")
State = tuple[tuple[int, ...], tuple[int, ...]]  # colours (n,), bonds (n-1,): 1 = strong


def cost(state: State) -> int:
    """The sum of the colours' costs."""
    return sum(COST[colour] for colour in state[0])


def sites(state: State) -> list[list[tuple[int, ...]]]:
    """For each rule the nodes of each of its sites."""
    colours = state[0]
    reds = [(i,) for i, colour in enumerate(colours) if colour == RED]
    pairs = [(i, i + 1) for i in range(len(colours) - 1) if colours[i] == HOT and colours[i + 1] == HOT]
    return [reds, reds, pairs]


def rewrite(state: State, rule: int, site: tuple[int, ...]) -> State:
    """The chain after one rewrite."""
    colours, bonds = state
    i = site[0]
    if rule == 2:
        fused = GOLD if bonds[i] else ASH
        return (*colours[:i], fused, *colours[i + 2 :]), (*bonds[:i], *bonds[i + 1 :])
    return (*colours[:i], GREEN if rule == 0 else HOT, *colours[i + 1 :]), bonds


@cache
def optimum(state: State) -> int:
    """The largest return from here, by exhaustive search; stopping gives 0."""
    gains = [0]
    for rule, found in enumerate(sites(state)):
        for site in found:
            after = rewrite(state, rule, site)
            gains.append(cost(state) - cost(after) + optimum(after))
    return max(gains)


def greedy(state: State) -> int:
    """What taking the best immediate gain as long as there is one returns."""
    total = 0
    while True:
        after = [rewrite(state, rule, site) for rule, found in enumerate(sites(state)) for site in found]
        best = min(after, key=cost, default=state)
        if cost(best) >= cost(state):
            return total
        total += cost(state) - cost(best)
        state = best


class ToyRewriteEnv(gymnasium.Env):
    """The chain as a gymnasium environment.

    Args:
        length: nodes at the start.
        horizon: steps until truncation.
        num_locations: L.
        random_start: draw length (3 .. length) and bonds anew at each reset; else bonds alternate, strong first.

    The last info tells the cheapest chain as `episode`, and `reset` takes it as its option "start". With its option
    "patience" an episode is cut off after so many steps without a cheaper chain.
    """

    def __init__(self, length: int = 6, horizon: int = 20, num_locations: int = 8, random_start: bool = False) -> None:
        self.length, self.horizon, self.random_start = length, horizon, random_start
        rules, nodes_per_location = len(RULES) + 1, 4
        high = np.array([len(COST) - 1, 1.0, 1.0], dtype=np.float32)
        self.observation_space = spaces.Dict(
            {
                "graph": spaces.Graph(spaces.Box(np.zeros(3, np.float32), high), spaces.Box(0.0, 1.0, (2,))),
                "rule_mask": spaces.MultiBinary(rules),
                "location_mask": spaces.MultiBinary((rules, num_locations)),
                "location_nodes": spaces.Box(-1, 2**31 - 1, (rules, num_locations, nodes_per_location), np.int32),
                "location_places": spaces.Box(-(2**63), 2**63 - 1, (rules, num_locations, 3), np.int64),
            }
        )
        self.action_space = spaces.MultiDiscrete([rules, num_locations])
        self.state: State = ((), ())
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        info = self.begin(seed, options)
        return self.observed(), info

    def begin(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        """A new episode; its info."""
        super().reset(seed=seed)
        length, bonds = self.length, tuple(1 - i % 2 for i in range(self.length - 1))
        if self.random_start:
            length = int(self.np_random.integers(3, self.length + 1))
            bonds = tuple(int(bond) for bond in self.np_random.integers(0, 2, length - 1))
        self.state, self.steps = ((RED,) * length, bonds), 0
        if options and "start" in options:
            colours, found = options["start"]["plan"]
            self.state = tuple(colours), tuple(found)
        self.cheapest, self.better = self.state, 0
        self.patience = (options or {}).get("patience", self.horizon)
        return {"run_secs": cost(self.state) * 1e-3, "rule": "reset"}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        reward, terminated, truncated, info = self.move(action)
        return self.observed(), reward, terminated, truncated, info

    def move(self, action: Any) -> tuple[float, bool, bool, dict]:
        """A step, unseen."""
        rule, location = (int(part) for part in action)
        self.steps += 1
        before, name, terminated, reward = cost(self.state), "stop", rule == len(RULES) and location == 0, 0.0
        if not terminated:
            found = sites(self.state)[rule] if rule < len(RULES) else []
            name = RULES[rule] if rule < len(RULES) else "stop"
            if location < len(found):
                self.state = rewrite(self.state, rule, found[location])
                reward = float(before - cost(self.state))
                terminated = not any(sites(self.state))
            else:
                reward = -100.0
        info: dict[str, Any] = {"run_secs": cost(self.state) * 1e-3, "rule": name}
        if cost(self.state) < cost(self.cheapest):
            self.cheapest, self.better = self.state, self.steps
        truncated = not terminated and (self.steps >= self.horizon or self.steps - self.better >= self.patience)
        if terminated or truncated:
            plan = [list(part) for part in self.cheapest]
            info["episode"] = {"model": "toy", "run_secs": cost(self.cheapest) * 1e-3, "plan": plan}
        return reward, terminated, truncated, info

    def observed(self) -> dict[str, Any]:
        """What an agent sees of the chain as it is."""
        return deepcopy(_observed(self.state, self.observation_space["location_nodes"].shape))


@cache
def _observed(state: State, shape: tuple[int, int, int]) -> dict[str, Any]:
    colours, bonds = state
    links = np.array([(i, i + 1) for i in range(len(bonds))], dtype=np.int64).reshape(-1, 2)
    edges = np.array([(bond, 1.0) for bond in bonds], dtype=np.float32).reshape(-1, 2)
    nodes = np.array([(colour, COST[colour] / 11, 1.0) for colour in colours], dtype=np.float32)
    mask = np.zeros(shape[:2], dtype=np.int8)
    location_nodes = np.full(shape, -1, dtype=np.int32)
    for rule, found in enumerate(sites(state)):
        for location, site in enumerate(found[: mask.shape[1]]):
            mask[rule, location] = 1
            location_nodes[rule, location, : len(site)] = site
    places, found = np.zeros((*mask.shape, 3), dtype=np.int64), mask.nonzero()
    places[found] = place_keys(np.array(colours, np.uint64), links, found[0], location_nodes[found], radii=(0, 1))
    mask[len(RULES), 0] = 1
    return {
        "graph": spaces.GraphInstance(nodes, edges, links),
        "rule_mask": mask.any(axis=1).astype(np.int8),
        "location_mask": mask,
        "location_nodes": location_nodes,
        "location_places": places,
    }
