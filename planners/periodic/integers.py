"""Integer programs, solved by scipy's HiGHS without a word."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = tuple[dict[int, float], float, float]
"""Coefficients by column, and between what the sum must lie."""


def minimized(
    cost: Mapping[int, float], rows: Sequence[Row], low: Sequence[float], high: Sequence[float], whole: Sequence[bool],
    limit_s: float,
) -> Any:  # fmt: skip
    """scipy's answer to the program with the least `cost` (by column) within about `limit_s` seconds.

    Columns lie between `low` and `high`; those that are `whole` are integers.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    values = [value for row, _, _ in rows for value in row.values()]
    where = ([n for n, (row, _, _) in enumerate(rows) for _ in row], [c for row, _, _ in rows for c in row])
    matrix = csr_array((values, where), shape=(len(rows), len(low)))
    with _quiet():
        return milp(
            [cost.get(column, 0.0) for column in range(len(low))],
            integrality=np.array(whole),
            bounds=Bounds(low, high),
            constraints=LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints a line of its own now and then, whatever one tells it."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
