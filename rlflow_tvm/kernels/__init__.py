"""What a graph compiles to: legalisation, schedule rules, the build pipeline, and the list of kernels."""

from __future__ import annotations

from tvm.relax.pipeline import PIPELINE_MAP, register_pipeline

from .build import compile_kernels, tir_pipeline
from .choice import BY_SHAPE, Choice, Choices, Chooser, heuristic_choice
from .explain import KernelRule, explain, explain_kernel
from .extract import Kernel, Launch, Launches, Lowered, Lowering, extract_kernels
from .fuse import kernel_key
from .pipeline import PIPELINE_NAME, pipeline
from .schedule import RULE_ATTR, SCHEDULED_ATTR, schedule_kernel
from .target import as_target, current_target, default_target, num_cores, vector_lanes
from .tuned import TUNED_RULE
from .version import source_version

PIPELINE_VERSION = source_version()
"""Changes whenever kernels could: a measurement made under another version says nothing about this one."""


def register() -> None:
    """Make `tvm.relax.get_pipeline("rlflow")` give `pipeline`; done once, however often it is called."""
    if PIPELINE_NAME not in PIPELINE_MAP:
        register_pipeline(PIPELINE_NAME)(pipeline)


__all__ = [
    "BY_SHAPE",
    "PIPELINE_VERSION",
    "RULE_ATTR",
    "SCHEDULED_ATTR",
    "TUNED_RULE",
    "Choice",
    "Choices",
    "Chooser",
    "Kernel",
    "KernelRule",
    "Launch",
    "Launches",
    "Lowered",
    "Lowering",
    "as_target",
    "compile_kernels",
    "current_target",
    "default_target",
    "explain",
    "explain_kernel",
    "extract_kernels",
    "heuristic_choice",
    "kernel_key",
    "num_cores",
    "pipeline",
    "register",
    "schedule_kernel",
    "tir_pipeline",
    "vector_lanes",
]
