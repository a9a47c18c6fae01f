"""Converters of `GRU`, `LSTM` and `RNN`, which TVM's importer does not know: a static sequence is unrolled. What steps
do not wait for, the product with the inputs, is one product for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import tvm
from tvm import relax

from rlflow_tvm.frontend.reductions import Converter
from rlflow_tvm.frontend.writer import dtype_of

_TOGETHER = 32
"""Tensors that one kernel cuts apart or puts together at most: one of 300 takes half a minute to build, and asks of
each element which of them it is of."""
_USUAL = {"RNN": [b"Tanh"], "GRU": [b"Sigmoid", b"Tanh"], "LSTM": [b"Sigmoid", b"Tanh", b"Tanh"]}

Activation = Callable[[relax.Expr], relax.Expr]


class _Weights(NamedTuple):
    """Of one direction; I inputs, H hidden, G gates."""

    inputs: relax.Expr  # (I, G H)
    hidden: relax.Expr  # (H, G H)
    input_bias: relax.Expr | None  # (G H,)
    hidden_bias: relax.Expr | None
    peepholes: list[relax.Expr] | None  # of an LSTM's input, output and forget gate, (H,) each


class _State(NamedTuple):
    """Before a step, (batch, H); None is zero. `cell`: an LSTM's."""

    hidden: relax.Expr | None
    cell: relax.Expr | None


def _recurrent(operator: str) -> Converter:
    def convert(bb: relax.BlockBuilder, inputs: list, attrs: Mapping, opset: int) -> relax.Expr:
        steps = int(inputs[0].ty.shape.values[0])
        _check_lengths(inputs[4], steps)
        ways = {b"forward": [1], b"reverse": [-1], b"bidirectional": [1, -1]}[attrs.get("direction", b"forward")]
        activations = _activations(operator, attrs, len(ways), dtype_of(inputs[0]))
        linear = bool(attrs.get("linear_before_reset", 0))
        hidden_size = int(inputs[2].ty.shape.values[-1])
        if attrs.get("hidden_size", hidden_size) != hidden_size:
            raise ValueError(
                f"its weights are of {hidden_size} hidden units, its hidden_size is {attrs['hidden_size']}"
            )
        by_way: list[tuple[list[relax.Expr], _State]] = []
        for number, way in enumerate(ways):
            weights = _weights(bb, operator, inputs, number, linear)
            state = _State(*(_of_direction(bb, inputs[i], number) for i in (5, 6)))
            found = []
            for gates in _by_step(bb, inputs[0], weights)[::way]:
                if operator == "LSTM":
                    state = _lstm(bb, gates, state, weights, activations[number])
                elif operator == "GRU":
                    state = _State(_gru(bb, gates, state.hidden, weights, activations[number], linear), None)
                else:
                    gates = _plus_hidden(bb, gates, state.hidden, weights)
                    state = _State(bb.normalize(activations[number][0](gates)), None)
                found.append(state.hidden)
            by_way.append((found[::way], state))
        batch = int(inputs[0].ty.shape.values[1])
        all_steps = [_stacked(bb, found, (steps, 1, batch, hidden_size)) for found, _ in by_way]
        every = bb.normalize(relax.op.concat(all_steps, 1)) if len(ways) > 1 else all_steps[0]
        last = (len(ways), batch, hidden_size)
        outputs = [every, _stacked(bb, [state.hidden for _, state in by_way], last)]
        if operator == "LSTM":
            outputs.append(_stacked(bb, [state.cell for _, state in by_way], last))
        return relax.Tuple(outputs)

    return convert


def _stacked(bb: relax.BlockBuilder, tensors: Sequence[relax.Expr], shape: tuple[int, ...]) -> relax.Expr:
    """Tensors of one shape, put together along their first axis, as one of `shape`."""
    while len(tensors) > 1:
        groups = [list(tensors[i : i + _TOGETHER]) for i in range(0, len(tensors), _TOGETHER)]
        tensors = [bb.emit(relax.op.concat(group, 0)) if len(group) > 1 else group[0] for group in groups]
    return bb.normalize(relax.op.reshape(tensors[0], shape))


def _check_lengths(given: relax.Expr | None, steps: int) -> None:
    """ValueError unless every sequence of the batch has all steps."""
    if given is not None and not (isinstance(given, tvm.ir.GenericConst) and (given.value.numpy() == steps).all()):
        raise ValueError("its input 'sequence_lens' may shorten sequences, which is not supported: leave it out")
    if not steps:
        raise ValueError("its sequence is empty")


def _activations(operator: str, attrs: Mapping, ways: int, dtype: str) -> list[list[Activation]]:
    """Each direction's; alpha and beta are told of those alone that take them."""
    names = [name.lower() for name in attrs.get("activations", None) or _USUAL[operator] * ways]
    alphas, betas = (iter(attrs.get(f"activation_{which}", None) or ()) for which in ("alpha", "beta"))
    made = [_activation(name, alphas, betas, dtype) for name in names]
    count = len(_USUAL[operator])
    return [made[i * count : (i + 1) * count] for i in range(ways)]


def _activation(name: bytes, alphas: Iterator[float], betas: Iterator[float], dtype: str) -> Activation:
    simple = {b"relu": relax.op.nn.relu, b"sigmoid": relax.op.sigmoid, b"tanh": relax.op.tanh}
    if name in simple:
        return simple[name]
    if name != b"hardsigmoid":
        raise ValueError(f"its activation {name.decode()!r} is not supported")
    slope, shift = relax.const(next(alphas, 0.2), dtype), relax.const(next(betas, 0.5), dtype)

    def hard_sigmoid(x: relax.Expr) -> relax.Expr:
        return relax.op.clip(relax.op.add(relax.op.multiply(x, slope), shift), 0, 1)

    return hard_sigmoid


def _of_direction(bb: relax.BlockBuilder, given: relax.Expr | None, number: int) -> relax.Expr | None:
    """The part of an input whose first axis counts directions."""
    if given is None:
        return None
    shape = [int(extent) for extent in given.ty.shape.values]
    if shape[0] > 1:
        given = bb.normalize(relax.op.strided_slice(given, [0], [number], [number + 1]))
    return bb.normalize(relax.op.reshape(given, shape[1:]))


def _weights(bb: relax.BlockBuilder, operator: str, inputs: list, number: int, linear: bool) -> _Weights:
    own_inputs, own_hidden, bias, peepholes = (_of_direction(bb, inputs[i], number) for i in (1, 2, 3, 7))
    of_inputs, of_hidden = (bb.emit(relax.op.permute_dims(w, [1, 0])) for w in (own_inputs, own_hidden))
    if bias is None:
        input_bias = hidden_bias = None
    else:
        halves = bb.emit(relax.op.split(bias, 2, 0))
        input_bias, hidden_bias = (relax.TupleGetItem(halves, i) for i in range(2))
        if not linear:  # then they are added up wherever they are
            input_bias, hidden_bias = bb.emit(relax.op.add(input_bias, hidden_bias)), None
    parts = None if peepholes is None or operator != "LSTM" else _cut(bb, peepholes, 3)
    return _Weights(of_inputs, of_hidden, input_bias, hidden_bias, parts)


def _by_step(bb: relax.BlockBuilder, data: relax.Expr, weights: _Weights) -> list[relax.Expr]:
    """What the inputs (steps, batch, I) add to the gates of each step, (batch, G H), with the bias."""
    steps, batch, width = (int(extent) for extent in data.ty.shape.values)
    flat = bb.normalize(relax.op.reshape(data, (steps * batch, width)))
    gates = bb.normalize(relax.op.matmul(flat, weights.inputs))
    if weights.input_bias is not None:
        gates = bb.normalize(relax.op.add(gates, weights.input_bias))
    return _rows(bb, gates, steps, batch)


def _rows(bb: relax.BlockBuilder, whole: relax.Expr, parts: int, rows: int) -> list[relax.Expr]:
    """`whole` (parts * rows, N) as so many of `rows`."""
    if parts == 1:
        return [whole]
    size = 1  # of a group, in parts
    while size * _TOGETHER < parts:
        size *= _TOGETHER
    bounds = list(range(size, parts, size))
    cut = bb.emit(relax.op.split(whole, [bound * rows for bound in bounds], 0))
    groups = [bb.emit(relax.TupleGetItem(cut, i)) for i in range(len(bounds) + 1)]
    return [
        each
        for group, begin in zip(groups, [0, *bounds], strict=True)
        for each in _rows(bb, group, min(size, parts - begin), rows)
    ]


def _cut(bb: relax.BlockBuilder, whole: relax.Expr, parts: int) -> list[relax.Expr]:
    """Along the last axis, by slices, which the kernels that read them do themselves: a split is a kernel more."""
    shape = [int(extent) for extent in whole.ty.shape.values]
    axis, size = len(shape) - 1, shape[-1] // parts
    return [bb.emit(relax.op.strided_slice(whole, [axis], [i * size], [(i + 1) * size])) for i in range(parts)]


def _plus_hidden(bb: relax.BlockBuilder, gates: relax.Expr, hidden: relax.Expr | None, weights: _Weights) -> relax.Expr:
    if hidden is None:
        return gates
    return bb.normalize(relax.op.add(gates, relax.op.matmul(hidden, weights.hidden)))


def _lstm(
    bb: relax.BlockBuilder, gates: relax.Expr, state: _State, weights: _Weights, activations: Sequence[Activation]
) -> _State:
    """One step: gates in, out, forget, cell."""
    f, g, h = activations
    gate_in, gate_out, gate_forget, new = _cut(bb, _plus_hidden(bb, gates, state.hidden, weights), 4)

    def peeped(gate: relax.Expr, number: int, cell: relax.Expr | None) -> relax.Expr:
        if weights.peepholes is None or cell is None:
            return gate
        return relax.op.add(gate, relax.op.multiply(weights.peepholes[number], cell))

    cell = relax.op.multiply(f(peeped(gate_in, 0, state.cell)), g(new))
    if state.cell is not None:
        cell = relax.op.add(relax.op.multiply(f(peeped(gate_forget, 2, state.cell)), state.cell), cell)
    cell = bb.emit(cell)
    return _State(bb.emit(relax.op.multiply(f(peeped(gate_out, 1, cell)), h(cell))), cell)


def _gru(
    bb: relax.BlockBuilder,
    gates: relax.Expr,
    hidden: relax.Expr | None,
    weights: _Weights,
    activations: Sequence[Activation],
    linear: bool,
) -> relax.Expr:
    """One step: gates update, reset, new; `linear`: reset applies to the product with the state, not to the state."""
    f, g = activations
    update, reset, new = _cut(bb, gates, 3)
    if linear:
        if hidden is None:
            from_hidden = None if weights.hidden_bias is None else _cut(bb, weights.hidden_bias, 3)
        else:
            product = bb.normalize(relax.op.matmul(hidden, weights.hidden))
            if weights.hidden_bias is not None:
                product = bb.normalize(relax.op.add(product, weights.hidden_bias))
            from_hidden = _cut(bb, product, 3)
        if from_hidden is not None:
            update, reset = (relax.op.add(x, more) for x, more in zip((update, reset), from_hidden, strict=False))
            new = relax.op.add(new, relax.op.multiply(f(reset), from_hidden[2]))
    elif hidden is not None:
        width = int(hidden.ty.shape.values[-1])
        halves = bb.emit(relax.op.split(weights.hidden, [2 * width], -1))
        of_both, of_new = (bb.emit(relax.TupleGetItem(halves, i)) for i in range(2))
        both = _cut(bb, bb.normalize(relax.op.matmul(hidden, of_both)), 2)
        update, reset = (relax.op.add(x, more) for x, more in zip((update, reset), both, strict=True))
        new = relax.op.add(new, relax.op.matmul(relax.op.multiply(f(reset), hidden), of_new))
    kept = bb.emit(f(update))
    one = relax.const(1, dtype_of(kept))
    found = relax.op.multiply(relax.op.subtract(one, kept), g(new))
    if hidden is not None:
        found = relax.op.add(found, relax.op.multiply(kept, hidden))
    return bb.emit(found)


RECURRENT: dict[str, Converter] = {operator: _recurrent(operator) for operator in _USUAL}
