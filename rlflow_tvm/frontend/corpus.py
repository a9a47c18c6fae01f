"""A corpus of graphs for orders of passes: training and inference of GPT-2, BERT and ResNet, and slices of them.

Nothing is downloaded or kept: the graphs are drawn anew, the same each time, in some seconds. They are as
TVM's importer (and its differentiation) leaves them, not cleaned.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.relax.frontend.onnx import from_onnx as tvm_from_onnx

from rlflow_tvm import ir
from rlflow_tvm.dataflow import Dataflow, Node, substitute, variables_of
from rlflow_tvm.frontend.corpus_models import FAMILIES

_SEED = 8
_DRAWS = 16
_SLICES = 4
_TESTED = 3  # of so many structures of a kind one
_SLICE_NODES = (12, 120)


@dataclass(frozen=True)
class CorpusGraph:
    """One of the corpus. `name`: FAMILY-{train,infer}-NUMBER[.SLICE]; `mod`: in the working form; `test`: whether it
    is to be tested on rather than learnt from."""

    name: str
    family: str
    training: bool
    test: bool
    mod: tvm.IRModule


def corpus(draws: int = _DRAWS) -> list[CorpusGraph]:
    """All graphs: `draws` of each family, as it is trained and as it is used, each with slices.

    Whether a graph is to be tested on is decided by what it computes, whatever its sizes: graphs that differ in nothing
    else are on the same side, and a slice is where the graph is that it was cut from, or left out where the other side
    has its like.
    """
    whole = list(_whole(draws))
    sides = {structure(graph.mod): graph.test for graph in whole}
    kept = []
    for number, graph in enumerate(whole):
        kept.append(graph)
        rng = np.random.default_rng([_SEED, number])
        for cut in range(_SLICES):
            mod = _sliced(graph.mod, rng)
            if mod is not None and sides.setdefault(structure(mod), graph.test) == graph.test:
                kept.append(CorpusGraph(f"{graph.name}.{cut}", graph.family, graph.training, graph.test, mod))
    return kept


def _whole(draws: int) -> Iterator[CorpusGraph]:
    for kind, family in enumerate(FAMILIES):
        for training in (True, False):
            mods = [corpus_module(family, training, [_SEED, kind, int(training), number]) for number in range(draws)]
            structures = [structure(mod) for mod in mods]
            tested = set(sorted(set(structures))[::_TESTED])
            for number, (mod, told) in enumerate(zip(mods, structures, strict=True)):
                name = f"{family}-{'train' if training else 'infer'}-{number}"
                yield CorpusGraph(name, family, training, told in tested, mod)


def corpus_module(family: str, training: bool, seed: list[int]) -> tvm.IRModule:
    """A graph of the family in the working form; for training the loss and all weights' gradients."""
    model = FAMILIES[family](np.random.default_rng(seed), training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the importer tells each name that it changes
        mod = tvm_from_onnx(model)
    mod = ir.detach(mod).mod
    return _with_gradients(mod) if training else _alone(mod["main"], ir.num_inputs(mod["main"]))


def _alone(func: relax.Function, inputs: int) -> tvm.IRModule:
    mod = tvm.IRModule()
    mod["main"] = func.with_attrs({"num_input": inputs, "global_symbol": "main"})
    return mod


def _with_gradients(mod: tvm.IRModule) -> tvm.IRModule:
    """What a step of training computes: the loss, and its gradients with respect to the weights, one tuple. Weights
    are inputs then, behind the others: they change."""
    func = mod["main"]
    weights = [param for param in func.params[ir.num_inputs(func) :] if str(param.ty.dtype) == "float32"]
    adjoint = transform.Gradient("main", weights)(mod)["main_adjoint"]
    results = relax.Tuple(list(variables_of(adjoint.body.body)))  # it was a pair of the loss and a tuple
    body = relax.SeqExpr(adjoint.body.blocks, results)
    inputs = list(adjoint.params[: ir.num_inputs(func)])
    trained = [p for p in adjoint.params[len(inputs) :] if str(p.ty.dtype) == "float32"]
    tables = [p for p in adjoint.params[len(inputs) :] if str(p.ty.dtype) != "float32"]
    types = relax.TupleType([field.ty for field in results.fields])
    flat = relax.Function([*inputs, *trained, *tables], body, types)
    return _alone(relax.BlockBuilder().normalize(flat), len(inputs) + len(trained))


def structure(mod: tvm.IRModule) -> str:
    """A hash (hexadecimal) of which operators read which values, in order: of no sizes and no attributes."""
    graph = Dataflow.from_module(mod)
    number = dict.fromkeys(graph.params, -1)
    told = hashlib.sha256()
    for place, node in enumerate(graph.nodes):
        number[node.var] = place
        told.update(f"{node.op}{[number[var] for var in node.inputs]};".encode())
    told.update(str([number[var] for var in graph.outputs]).encode())
    return told.hexdigest()[:16]


def _sliced(mod: tvm.IRModule, rng: np.random.Generator) -> tvm.IRModule | None:
    """A run of the graph's nodes as a graph: what it reads from outside are its parameters, inputs first; what is read
    outside are its results. None where it would compute nothing that is a tensor, or from weights alone."""
    graph = Dataflow.from_module(mod)
    length = min(int(rng.integers(*_SLICE_NODES)), len(graph.nodes) - 1)
    first = int(rng.integers(0, len(graph.nodes) - length))
    nodes = graph.nodes[first : first + length]
    own = {node.var for node in nodes}
    read = dict.fromkeys(var for node in nodes for var in node.inputs if var not in own)
    after = {var for node in graph.nodes[first + length :] for var in node.inputs} | set(graph.outputs)
    results = [node.var for node in nodes if node.var in after and isinstance(node.var.ty, relax.TensorType)]
    if not results or any(not isinstance(var.ty, relax.TensorType) for var in read):
        return None
    weights = set(graph.params[graph.inputs :])
    if not _works(nodes, set(read) - weights):
        return None
    ordered = [*(var for var in read if var not in weights), *(var for var in read if var in weights)]
    params = {var: relax.Var(f"p{i}", var.ty) for i, var in enumerate(ordered)}
    return _built(nodes, params, results, sum(var not in weights for var in read))


def _works(nodes: tuple[Node, ...], given: set[relax.Var]) -> bool:
    """Whether something is called that depends on what is given."""
    found = False
    for node in nodes:
        if not given.isdisjoint(node.inputs):
            given.add(node.var)
            found = found or isinstance(node.value, relax.Call)
    return found


def _built(
    nodes: tuple[Node, ...], params: dict[relax.Var, relax.Var], results: list[relax.Var], inputs: int
) -> tvm.IRModule:
    builder, named = relax.BlockBuilder(), dict(params)
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            for node in nodes:
                named[node.var] = builder.emit(substitute(node.value, named))
            outputs = [builder.emit_output(named[var]) for var in results]
        builder.emit_func_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
    return _alone(builder.get()["main"], inputs)
