"""The version of the kernels: what their measured times depend on beside kernel and target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import tvm

_BEFORE_THE_KERNEL = {
    "adopt.py",
    "check.py",
    "entries.py",
    "explain.py",
    "extract.py",
    "fuse.py",
    "launches.py",
    "legalize.py",
    "partition.py",
    "split.py",
}
"""What only decides which kernels a graph has: a kernel is known by its own structure, whatever that came from."""


def source_version() -> str:
    """TVM's version and a digest of the source that makes code of a kernel, so that no edit of a schedule leaves old
    times valid."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name not in _BEFORE_THE_KERNEL:
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return f"tvm {tvm.__version__}, kernels {digest.hexdigest()[:16]}"
