"""Running many small functions compiled as one: each distinct operator is built once, so hundreds take seconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from small_models import TARGET
from tvm import relax
from tvm.relax.utils import copy_with_new_vars

from rlflow_tvm.kernels import Lowering
from rlflow_tvm.verify import flatten


def outputs(functions: Sequence[relax.Function], inputs: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Each function's outputs on its arguments; lowered as for a build, but not scheduled."""
    copies = [copy_with_new_vars(function) for function in functions]
    params = [param for function in copies for param in function.params]
    block = relax.DataflowBlock([b for function in copies for b in function.body.blocks[0].bindings])
    results = relax.Tuple([function.body.body for function in copies])
    main = relax.Function(params, relax.SeqExpr([block], results), results.ty, True)
    main = relax.BlockBuilder().normalize(main).with_attrs({"global_symbol": "main", "num_input": len(params)})
    mod = Lowering(TARGET).lower(tvm.IRModule({"main": main})).mod
    executable = tvm.compile(mod, TARGET, relax_pipeline=relax.get_pipeline("default_build"))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(array) for arrays in inputs for array in arrays))
    return [[tensor.numpy() for tensor in flatten(result)] for result in found]
