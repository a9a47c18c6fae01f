"""Peak memory of a graph, by the lives of its tensors."""

from __future__ import annotations

from collections.abc import Iterable

import tvm
from tvm import relax

from rlflow_tvm.cost.metrics import static_shape, tensor_bytes
from rlflow_tvm.errors import CostError
from rlflow_tvm.ir import num_inputs

_VIEWS = frozenset({"relax.reshape"})  # what the build turns into another view of the same storage


def peak_bytes(mod: tvm.IRModule) -> int:
    """Most bytes of inputs, outputs and intermediate tensors alive at once when `main` runs from top to bottom.

    Weights (parameters behind `num_input`, constants, and what is computed from these alone) are not counted: they
    are there all the time, and rewriting trades intermediates. A tensor lives from the step that makes it to the last
    that reads it; the caller holds inputs and outputs throughout their life, inputs from the start, outputs to the end.
    A step's output never reuses the memory of an input that dies there, as in TVM's own planning of storage.
    Give the module after lowering: before it, tensors inside what will be one kernel count too.
    CostError for shapes that are not static.
    """
    func = mod["main"]
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    lives = _Lives(func.params[: num_inputs(func)], end=len(bindings))
    for step, binding in enumerate(bindings):
        lives.bind(binding.var, binding.value, step)
    lives.use(func.body.body, len(bindings))
    return lives.peak()


class _Lives:
    """First and last step of each tensor; a variable holds one tensor, or several in a tuple."""

    def __init__(self, inputs: Iterable[relax.Var], end: int) -> None:
        self._held: dict[relax.Var, list[int]] = {}
        self._sizes: list[int] = []
        self._born: list[int] = []
        self._last: list[int] = []
        self._end = end
        for var in inputs:
            self._held[var] = self._allocate(var.ty, var.name, 0)
            for tensor in self._held[var]:
                self._last[tensor] = end

    def bind(self, var: relax.Var, value: relax.Expr, step: int) -> None:
        """`var` is bound to `value` at `step`."""
        read = self.use(value, step)
        if isinstance(value, relax.Call) and not _is_view(value):
            # What reads no input and no intermediate is made of weights alone, or is a shape: nothing at run time.
            made_of_weights = not read and bool(relax.analysis.free_vars(value))
            self._held[var] = [] if made_of_weights else self._allocate(var.ty, var.name, step)
        else:
            self._held[var] = read

    def use(self, value: relax.Expr, step: int) -> list[int]:
        """The tensors that `value` reads; they live at least to `step`."""
        read = self._reads(value)
        for tensor in read:
            self._last[tensor] = max(self._last[tensor], step)
        return read

    def peak(self) -> int:
        """The most bytes alive at any step."""
        change = [0] * (self._end + 2)
        for size, born, last in zip(self._sizes, self._born, self._last, strict=True):
            change[born] += size
            change[last + 1] -= size
        alive = most = 0
        for delta in change:
            alive += delta
            most = max(most, alive)
        return most

    def _reads(self, value: relax.Expr) -> list[int]:
        if isinstance(value, relax.Var):
            return self._held.get(value, [])
        if isinstance(value, relax.Call):
            return [tensor for arg in value.args for tensor in self._reads(arg)]
        if isinstance(value, relax.Tuple):
            return [tensor for field in value.fields for tensor in self._reads(field)]
        if isinstance(value, relax.TupleGetItem):
            fields = self._reads(value.tuple_value)
            # A tuple that holds weights too, or tuples, has other numbers of tensors and fields: then all of it.
            flat = len(fields) == len(value.tuple_value.ty.fields)
            return [fields[value.index]] if flat else fields
        return []

    def _allocate(self, ty: relax.Type, name: str, step: int) -> list[int]:
        if isinstance(ty, relax.TupleType):
            return [tensor for field in ty.fields for tensor in self._allocate(field, name, step)]
        if not isinstance(ty, relax.TensorType):
            return []  # a shape or a scalar
        if ty.shape is None or not isinstance(ty.shape, relax.ShapeExpr):
            raise CostError(f"tensor {name} has no known shape: give the model static shapes (from_onnx does)")
        self._sizes.append(tensor_bytes(static_shape(ty.shape, f"tensor {name}"), str(ty.dtype)))
        self._born.append(step)
        self._last.append(step)
        return [len(self._sizes) - 1]


def _is_view(call: relax.Call) -> bool:
    return isinstance(call.op, tvm.ir.Op) and call.op.name in _VIEWS
