"""Scripts as modules: they lie in a folder of their own and import each other from it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))


@pytest.fixture(scope="session")
def compared() -> Path:
    """The runs that the repository keeps."""
    return SCRIPTS.parent / "docs" / "compared"
