"""Kernels for CPUs: legalisations and schedule rules for the targets of kind `llvm`."""
