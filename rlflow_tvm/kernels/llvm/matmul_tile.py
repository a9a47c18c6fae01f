"""How many rows and column vectors one register tile of a matrix product holds."""

from __future__ import annotations

from .conv_tile import accumulator_registers

_MAX_ROWS = 16
_MAX_VECTORS = 4  # a wider row of an unpacked matrix is many unaligned loads
_LATENCY = 4.0  # cycles until a sum may be added to again
_LOOP = 3.0  # cycles of the loop itself, per step of the reduction


def choose_tile(height: int, width: int, lanes: int) -> tuple[int, int]:
    """Rows and column vectors of a register tile: the pair with the fewest cycles for a `height` x `width` result.

    Per step of the reduction a tile of r rows and v vectors takes r*v multiply-adds, v loads and r broadcasts, two of
    either kind a cycle, and no less than the latency of an addition. Half a cycle a vector is for those that lie across
    two cache lines.
    """
    budget = accumulator_registers(lanes)
    columns = -(-width // lanes)
    best, best_cost = (1, 1), float("inf")
    for vectors in range(1, min(columns, _MAX_VECTORS) + 1):
        for rows in range(1, min(height, _MAX_ROWS, budget // vectors) + 1):
            cycles = max(rows * vectors / 2, (rows + vectors) / 2, _LATENCY) + _LOOP + vectors / 2
            cost = -(-height // rows) * -(-columns // vectors) * cycles
            if cost < best_cost:
                best, best_cost = (rows, vectors), cost
    return best
