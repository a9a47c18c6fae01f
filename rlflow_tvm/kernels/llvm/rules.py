"""The CPU's schedule rules in the order in which they are tried."""

from __future__ import annotations

from tvm import s_tir, tirx
from tvm.error import InternalError
from tvm.s_tir.dlight.base import ScheduleRule
from tvm.target import Target

from ..loops import has_ragged_loop
from .conv import Conv2d
from .cuts import cut_loops
from .elementwise import Elementwise, Fallback
from .empty import Empty
from .matmul import Matmul
from .matmul_prefetch import insert_prefetches
from .pixels import PixelConv, WindowPixelConv
from .pool import Pool2d
from .reduction import Reduction
from .tails import peel_tails
from .vector_math import vectorisable_math
from .winograd import Winograd

# the most special first; Fallback takes whatever is left
RULES: dict[str, ScheduleRule] = {
    "empty": Empty(),
    "winograd": Winograd(),
    "conv2d": Conv2d(),
    "conv2d_pixels": PixelConv(),
    "conv2d_window_pixels": WindowPixelConv(),
    "pool2d": Pool2d(),
    "matmul": Matmul(),
    "reduction": Reduction(),
    "elementwise": Elementwise(),
    "fallback": Fallback(),
}

_OWN_TAILS = frozenset({"winograd", "conv2d", "pool2d"})  # these see to their last tiles themselves


def schedule(func: tirx.PrimFunc, target: Target) -> tuple[str, tirx.PrimFunc] | None:
    """The name of the first rule that takes `func`, and what it makes of it; None where none does."""
    func = vectorisable_math(func)
    for name, rule in RULES.items():
        try:
            found = rule.apply(func, target, False)
        except (s_tir.ScheduleError, InternalError):
            # a primitive proves each of its steps and refuses the others, or fails a check of TVM's own where it does
            # not foresee a loop nest: the kernel is none of this rule's
            continue
        except TypeError:  # an extent is no number
            if not has_ragged_loop(func):
                raise
            continue
        if found is not None:
            scheduled = cut_loops(found.mod["main"])
            return name, scheduled if name in _OWN_TAILS else insert_prefetches(peel_tails(scheduled))
    return None
