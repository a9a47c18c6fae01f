"""What all tests share: a home folder of their own, so that neither measurements nor models of the user are touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def package_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`$RLFLOW_TVM_HOME` for the session."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLFLOW_TVM_HOME", str(home))
        yield home
