"""How the frontend tells of bad input."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlflow_tvm.errors import FrontendError


def message(call: Callable[[], object]) -> str:
    """What a call that is refused says: one line, and no long one."""
    with pytest.raises(FrontendError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    return text
