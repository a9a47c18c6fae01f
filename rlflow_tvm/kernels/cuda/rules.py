"""The GPU's schedule rules in the order in which they are tried."""

from __future__ import annotations

from tvm.s_tir.dlight import gpu

RULES = {
    "matmul": gpu.Matmul(),
    "gemv": gpu.GEMV(),
    "reduction": gpu.Reduction(),
    "general_reduction": gpu.GeneralReduction(),
    "fallback": gpu.Fallback(),
}


def schedule(func, target):
    for name, rule in RULES.items():
        try:
            found = rule.apply(func, target, False)
        except Exception as e:
            print("   !!", name, type(e).__name__, str(e).strip().splitlines()[-1][:150])
            continue
        if found is not None:
            if isinstance(found, list):
                found = found[0]
            return name, found.mod["main"]
    return None
