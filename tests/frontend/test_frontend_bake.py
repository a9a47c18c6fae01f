"""Constants of an imported module that are evaluated."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from rlflow_tvm import ir
from rlflow_tvm.frontend.bake import bake_constants


def test_a_table_is_not_read_before_all_is_known_to_be_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = relax.Var("ids", relax.TensorType((4,), "int64"))
    table = relax.const(np.arange(12, dtype="float32").reshape(6, 2))
    builder = relax.BlockBuilder()
    with builder.function("main", [ids]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.take(table, ids, axis=0))
        builder.emit_func_output(output)
    func = builder.get()["main"]
    monkeypatch.setattr(tvm.runtime.Tensor, "numpy", lambda _: pytest.fail("it was copied"))
    assert len(ir.single_block(bake_constants(func))) == 1
