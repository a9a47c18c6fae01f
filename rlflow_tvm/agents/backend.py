"""The one place that imports DGL, with its backend chosen first.

Without `DGLBACKEND` DGL writes a configuration file into the user's home folder and prints on import.
"""

from __future__ import annotations

import os

os.environ.setdefault("DGLBACKEND", "pytorch")

import dgl

__all__ = ["dgl"]
