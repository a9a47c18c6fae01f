"""Every kernel of every evaluation model, compiled by nvcc for both architectures, and within a thread block's limits.

Kernels that several models share are compiled once; each nvcc process compiles many kernels in one file.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_checks import (
    ARCHS,
    MOST_THREADS,
    STATIC_SHARED_BYTES,
    TARGETS,
    compile_with_nvcc,
    cuda_source,
    needs_nvcc,
    static_shared_bytes,
    threads,
)
from tvm import tirx

from rlflow_tvm.errors import FrontendError
from rlflow_tvm.frontend import from_onnx, zoo
from rlflow_tvm.kernels import RULE_ATTR, Lowering, schedule_kernel
from rlflow_tvm.kernels.precision import to_half

BATCH = 72
"""Kernels in one file."""

HALF = {"resnet18": "float16", "bert-base": "bfloat16"}
"""Models that are compiled in this precision besides float32."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, list[tirx.PrimFunc]]:
    """For each architecture the distinct kernels, scheduled, of all models that can be built here."""
    lowering = Lowering(TARGETS[ARCHS[0]])  # as for any other
    seen: dict[str, dict[str, tirx.PrimFunc]] = {arch: {} for arch in ARCHS}
    for name in zoo.names():
        try:
            mod = from_onnx(zoo.path(name))
        except FrontendError as error:
            if "needs" in str(error):  # the extra [zoo] is not installed
                continue
            raise
        for each in (mod, *([to_half(mod, HALF[name])] if name in HALF else [])):
            for kernel in lowering.kernels(each):
                for arch, scheduled in seen.items():
                    if kernel.key not in scheduled:
                        scheduled[kernel.key] = schedule_kernel(kernel.func, TARGETS[arch])
    return {arch: list(found.values()) for arch, found in seen.items()}


@pytest.mark.parametrize("name", ["demo", "squeezenet-tiny", "bert-tiny"])
def test_lowering_does_not_depend_on_the_architecture(name: str) -> None:
    mod = from_onnx(zoo.load(name))
    for each in (mod, to_half(mod, "float16"), to_half(mod, "bfloat16")):
        first, *others = ([kernel.key for kernel in Lowering(TARGETS[arch]).kernels(each)] for arch in ARCHS)
        assert all(keys == first for keys in others)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_compiles(arch: str, kernels: dict[str, list[tirx.PrimFunc]], tmp_path: Path) -> None:
    scheduled = kernels[arch]
    assert len(scheduled) > 100
    assert max(threads(func) for func in scheduled) <= MOST_THREADS
    assert "fallback" not in {str(func.attrs[RULE_ATTR]) for func in scheduled}
    batches = [scheduled[i : i + BATCH] for i in range(0, len(scheduled), BATCH)]

    def compile_batch(number: int, source: str) -> list[int]:
        folder = tmp_path / str(number)
        folder.mkdir()
        return static_shared_bytes(compile_with_nvcc(source, arch, folder))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = [pool.submit(compile_batch, i, cuda_source(batch, TARGETS[arch])) for i, batch in enumerate(batches)]
        shared = [found for each in running for found in each.result()]
    assert shared  # the report tells of them: tiles lie there
    assert max(shared) <= STATIC_SHARED_BYTES
    print(f"{arch}: {len(scheduled)} kernels in {len(batches)} files")
