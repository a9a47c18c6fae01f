"""Kernels that take what a formula says, in place of a worker that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm

from rlflow_tvm.cost.features import kernel_features

Formula = Callable[[Mapping[str, float], str], float]


def workers_by(secs: Formula) -> Callable[..., object]:
    """What may stand for `LocalWorkers`: `secs` of a kernel's features and its operands' temperatures."""

    class Workers:
        def __init__(self, *_arguments) -> None:
            pass

        def answers(self, requests, limit_secs, tries=1):
            for number, request in enumerate(requests):
                if request["op"] == "launch":
                    yield number, {"run_secs": 1e-7, "repeats": 7}
                    continue
                features = kernel_features(tvm.ir.load_json(request["func"]))
                yield number, {"run_secs": secs(features, request["cold"]), "repeats": 7, "spread": 0.0}

        def close(self) -> None:
            pass

    return Workers
