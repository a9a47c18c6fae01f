"""Whether the virtual machine can run what a graph was lowered to."""

from __future__ import annotations

import tvm
from tvm import relax

from rlflow_tvm.dataflow import Dataflow, Node, canonical
from rlflow_tvm.errors import KernelError
from rlflow_tvm.ir import CALL_IN_PLACE, is_static

_NO_OPERATORS = frozenset({"getitem", "other"})
_RUN_BY_THE_MACHINE = frozenset({"relax.reshape", "relax.shape_of", "relax.tensor_to_shape", "relax.null_value"})
_FOR_TRAINING = "relax.call_tir_with_grad"


def check_lowered(flow: Dataflow) -> None:
    """KernelError if an operator is left that the virtual machine cannot run (its legalisation gave it back).

    Or if a call of another function is, or a call that writes to a weight.
    """
    left = set()
    for node in flow.nodes:
        if node.op == "other" and isinstance(node.value, relax.Call) and isinstance(node.value.op, tvm.ir.GlobalVar):
            raise KernelError(
                f"main calls the function {node.value.op.name_hint}: "
                "make it private and inline it with relax.transform.InlinePrivateFunctions"
            )
        if node.op == CALL_IN_PLACE:
            _check_written(node, flow)
        if node.op in _NO_OPERATORS or node.op in _RUN_BY_THE_MACHINE:
            continue
        if node.op.startswith("relax.call_") and node.op != _FOR_TRAINING:
            continue
        if node.value.op.get_attr("FCallPacked") is None:
            unknown = next((var for var in node.inputs if not is_static(var.ty)), None)
            if unknown is not None:
                raise KernelError(
                    f"{node.op} reads {unknown.name} of type {unknown.ty}, and there are kernels for known shapes "
                    "only: rewrite what makes it, so that its shape does not depend on data"
                )
            left.add(node.op)
    if left:
        raise KernelError(
            f"no kernel is known for {', '.join(sorted(left))} with these attributes: "
            "rewrite or decompose the operator before building"
        )


def _check_written(node: Node, flow: Dataflow) -> None:
    """KernelError where a call writes to what is computed once for all runs: the next run would find it changed."""
    inputs = flow.params[: flow.inputs]
    computed = {each.var for each in flow.nodes}
    for index in node.value.attrs.inplace_indices:
        written = None if int(index) < 0 else node.value.args[1][int(index)]
        if written is None or (isinstance(written, relax.Var) and canonical(written) in computed.union(inputs)):
            continue
        raise KernelError(
            f"{node.value.args[0].name_hint} writes in place to a weight, or to what is computed from weights alone, "
            "which other runs read too: call it with call_tir instead of call_tir_inplace"
        )
