"""Keys of places: alike exactly where rule and surroundings are, whatever the order of nodes, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import LANES, conv_net, module
from tvm.relax import op as rx

from rlflow_tvm.envs.observation import observe
from rlflow_tvm.envs.places import KEYS, RADII, kind, place_keys
from rlflow_tvm.passes import GraphState, RewriteAction, default_rules


def graphs() -> st.SearchStrategy[tuple[list[int], list[tuple[int, int]]]]:
    """Kinds of few nodes, out of three, and edges from lower to higher numbers."""
    sizes = st.integers(2, 7)
    return sizes.flatmap(
        lambda n: st.tuples(
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
            st.lists(st.tuples(st.integers(0, n - 2), st.integers(1, n - 1)).filter(lambda e: e[0] < e[1]), max_size=9),
        )
    )


def surroundings(kinds: list[int], links: list[tuple[int, int]], radius: int) -> list[object]:
    """What the keys stand for, spelt out: of each node its kind, and the sorted ones of those around."""
    told: list[object] = list(kinds)
    for _ in range(radius):
        told = [
            (
                told[node],
                tuple(sorted((told[a] for a, b in links if b == node), key=repr)),
                tuple(sorted((told[b] for a, b in links if a == node), key=repr)),
            )
            for node in range(len(kinds))
        ]
    return told


def keys_of_nodes(kinds: list[int], links: list[tuple[int, int]], rule: int = 0) -> np.ndarray:
    nodes = np.arange(len(kinds))[:, None]
    pairs = np.array(links, np.int64).reshape(-1, 2)
    return place_keys(np.array(kinds, np.uint64), pairs, np.full(len(kinds), rule), nodes)


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_keys_are_alike_exactly_where_surroundings_are(graph):
    kinds, links = graph
    keys = keys_of_nodes(kinds, links)
    assert len(set(keys[:, 0].tolist())) == 1, "the rule is the same"
    for column, radius in enumerate(RADII, start=1):
        told = surroundings(kinds, links, radius)
        groups = defaultdict(set)
        for key, each in zip(keys[:, column].tolist(), told, strict=True):
            groups[repr(each)].add(key)
        assert all(len(found) == 1 for found in groups.values())
        assert len(set().union(*groups.values())) == len(groups)


@settings(max_examples=50, deadline=None)
@given(graphs(), st.randoms())
def test_the_order_of_nodes_and_edges_does_not_matter(graph, random):
    kinds, links = graph
    order = list(range(len(kinds)))
    random.shuffle(order)  # order[i]: the new number of node i
    moved = [(order[a], order[b]) for a, b in links]
    random.shuffle(moved)
    renumbered = [kinds[order.index(i)] for i in range(len(kinds))]
    assert np.array_equal(keys_of_nodes(renumbered, moved)[order], keys_of_nodes(kinds, links))


def test_rule_radius_and_the_order_of_a_sites_nodes_count():
    kinds, links = np.array([1, 2], np.uint64), np.array([[0, 1]])
    sites = np.array([[0, 1], [1, 0], [0, -1]])
    keys = np.concatenate([place_keys(kinds, links, np.full(3, rule), sites).ravel() for rule in (0, 1)])
    assert len(set(keys.tolist())) == 2 * (1 + 3 * len(RADII)), "the rule's key is the same for all sites"


def chain(strides: tuple[int, ...]) -> tvm.IRModule:
    """Convolutions with relu, one after another, over 16 channels; each pads, so that stride 1 keeps the shape."""

    def body(emit, x, **weights):
        for weight, stride in zip(weights.values(), strides, strict=True):
            x = emit(rx.nn.relu(emit(rx.nn.conv2d(x, weight, strides=stride, padding=1))))
        return rx.tanh(x)

    return module({"x": (1, 16, 16, 16)}, {f"w{i}": (16, 16, 3, 3) for i in range(len(strides))}, body)


def start(mod: tvm.IRModule) -> GraphState:
    return GraphState.from_module(mod, default_rules(LANES))


def places_of(state: GraphState, rule: str) -> np.ndarray:
    number = [each.name for each in state.ruleset.rules].index(rule)
    return observe(state)["location_places"][number, : len(state.sites[rule])]


def test_twin_layers_share_their_places_and_others_do_not():
    places = places_of(start(chain((1,) * 10)), "block_conv")
    alike = [len(np.unique(column)) for column in places.T]
    # radius 3 from conv and relu: the layers near both ends differ, those between do not
    assert alike[:2] == [1, 1]
    assert 3 <= alike[-1] < 10
    assert len(np.unique(places[4:6], axis=0)) == 1


def test_attributes_count_where_shapes_are_alike():
    def dilated(dilation: int) -> tvm.IRModule:
        def body(emit, x, w):
            return rx.nn.conv2d(x, w, padding=dilation, dilation=dilation)

        return module({"x": (1, 16, 16, 16)}, {"w": (16, 16, 3, 3)}, body)

    one, two = (places_of(start(dilated(dilation)), "block_conv") for dilation in (1, 2))
    assert one.shape == two.shape == (1, KEYS)
    assert (one == two).tolist() == [[True] + [False] * len(RADII)]


def test_a_rewrite_leaves_the_places_that_it_is_far_from():
    before = start(chain((1,) * 10))
    state = before.apply(RewriteAction("block_conv", before.sites["block_conv"][0]))
    kept = [set(np.unique(places_of(each, "block_conv")[:, -1]).tolist()) for each in (before, state)]
    assert len(state.sites["block_conv"]) == 9
    assert len(kept[0] & kept[1]) >= 2


def test_what_is_no_site_has_no_place():
    observation = observe(start(conv_net()))
    legal = observation["location_mask"].astype(bool)
    assert (observation["location_places"][~legal] == 0).all()
    assert (observation["location_places"][-1] == 0).all()  # stop
    assert (observation["location_places"][:-1][legal[:-1]] != 0).all()


def test_keys_are_the_same_in_every_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.modules['torch'] = None\n"
        "from rlflow_tvm.envs.observation import observe\n"
        "from rlflow_tvm.passes import GraphState, default_rules\n"
        "from small_models import LANES, conv_net\n"
        "places = observe(GraphState.from_module(conv_net(), default_rules(LANES)))['location_places']\n"
        "print(places[places != 0].tolist())"
    )
    folder = str(Path(__file__).parents[1])
    told = [
        subprocess.run(
            [sys.executable, "-c", code, folder],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1]
    assert len(told[0]) > 100
    assert kind("relax.add", (1, 2)) != kind("relax.add", (2, 1))
