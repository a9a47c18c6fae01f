"""The corpus of graphs that orders of passes are learnt from."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.frontend.corpus import CorpusGraph, corpus, corpus_module, structure
from rlflow_tvm.frontend.corpus_models import FAMILIES
from rlflow_tvm.passes.graph import Graph
from rlflow_tvm.passes.operations import Operations
from tests.small_models import machine_of


@pytest.fixture(scope="module")
def graphs() -> list[CorpusGraph]:
    return corpus(draws=3)


def test_graphs_are_well_formed_and_static(graphs):
    for graph in graphs:
        relax.analysis.well_formed(graph.mod)
        ir.check_static(graph.mod["main"])
        assert Operations.of(Graph.from_module(graph.mod)).total, graph.name


def test_every_family_is_there_trained_used_and_in_slices(graphs):
    there = {(g.family, g.training, "." in g.name) for g in graphs}
    assert there == {(f, t, s) for f in FAMILIES for t in (True, False) for s in (True, False)}
    assert len({g.name for g in graphs}) == len(graphs)


def test_no_structure_is_both_learnt_from_and_tested_on(graphs):
    tested, learnt = ({structure(g.mod) for g in graphs if g.test == test} for test in (True, False))
    assert not tested & learnt
    assert {(g.family, g.training) for g in graphs if g.test} == {(f, t) for f in FAMILIES for t in (True, False)}


def test_the_structure_is_of_no_sizes():
    mods = [corpus_module("gpt2", False, [3, n]) for n in range(10)]
    assert len({structure(mod) for mod in mods}) < len({tvm_ffi.structural_hash(mod["main"]) for mod in mods})


def test_the_corpus_is_the_same_each_time(graphs):
    again = {g.name: tvm_ffi.structural_hash(g.mod) for g in corpus(draws=3)}
    assert again == {g.name: tvm_ffi.structural_hash(g.mod) for g in graphs}


@pytest.mark.parametrize("family", ["gpt2", pytest.param("bert", marks=pytest.mark.slow), "resnet"])
def test_gradients_are_those_of_the_loss(family):
    """Each weight's, along a random direction, against central differences of the loss that the same module tells.

    A ResNet's are rougher: a small step bends at many a ReLU behind a batch normalisation.
    """
    mod = corpus_module(family, True, [1])
    rng = np.random.default_rng(0)
    machine = machine_of(mod)
    params, inputs = mod["main"].params, ir.num_inputs(mod["main"])
    values = [_drawn(param, rng) for param in params]

    def run(arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [t.numpy() for t in machine["main"](*map(tvm.runtime.tensor, arrays))]

    _, *gradients = run(values)
    trained = range(inputs - len(gradients), inputs)
    assert [g.shape for g in gradients] == [values[i].shape for i in trained]
    step, told, expected = 1e-3, [], []
    for i, gradient in zip(trained, gradients, strict=True):
        direction = rng.standard_normal(values[i].shape).astype("float32")
        ends = []
        for sign in (1, -1):
            moved = [v + sign * step * direction if j == i else v for j, v in enumerate(values)]
            ends.append(float(run(moved)[0]))
        told.append(float((gradient * direction).sum()))
        expected.append((ends[0] - ends[1]) / (2 * step))
    assert np.corrcoef(told, expected)[0, 1] > (0.98 if family == "resnet" else 0.9999)
    assert np.abs(told).sum() == pytest.approx(np.abs(expected).sum(), rel=0.1)


def _drawn(param: relax.Var, rng: np.random.Generator) -> np.ndarray:
    """Tokens within every table, masks of ones, targets of one class, weights that are neither small nor large."""
    shape, dtype = tuple(int(extent) for extent in param.ty.shape.values), str(param.ty.dtype)
    if dtype == "bool":
        return np.tril(np.ones(shape, bool))
    if dtype == "int64":
        return np.arange(np.prod(shape)).reshape(shape) % 2
    if param.name == "target":
        target = np.zeros(shape, "float32")
        target[..., 0] = 1
        return target
    return (0.3 * rng.standard_normal(shape)).astype(dtype)
