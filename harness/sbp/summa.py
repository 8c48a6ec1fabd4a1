"""SUMMA: a matmul Y = X W whose three tensors are blocks of one mesh rows x columns (van de Geijn and Watts 1997).

        columns                                  row i and column j have X[i, j], W[i, j], Y[i, j]
      X X X | W W W | Y Y Y
rows  X X X | W W W | Y Y Y       forward        for each panel k of what is summed over:
                                                 X[:, k] goes along the rows of the mesh, W[k, :] along its columns,
                                                 Y += X[:, k] W[k, :]
                                  backward       dX[:, k] = sum over a row of dY W[k, :]^T, W[k, :] along the columns
                                                 dW[k, :] = sum over a column of X[:, k]^T dY, X[:, k] along the rows

Each device receives |X| / rows + |W| / columns forward, and twice that backward, for every micro-batch (AutoDDL, sec.
5.1). A look-up is the product of one-hot rows with a weight that is laid out as that of a head, which may be the same
parameter: forward it is the first of the two backward products, backward the second. Convolutions are data parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import NamedTuple

from harness.sbp.device_grid import Degree, Grid, Summa
from harness.sbp.matmul_chain import Matmul


class Call(NamedTuple):
    """A collective over the devices of `degree`, `times` in a micro-batch, each with a buffer of `size` bytes."""

    name: str
    phase: str
    degree: Degree
    size: float
    times: int


def panels(grid: Grid, mesh: Summa) -> int:
    """Returns the number of panels: one column of the mesh has it of the input, one row of the weight."""
    return lcm(grid.size(mesh.rows), grid.size(mesh.columns))


def panel_bytes(item: Matmul, grid: Grid, mesh: Summa, width: int) -> tuple[float, float]:
    """Returns the bytes of a panel that goes along rows, of the input (of a look-up: the output), and of one of the
    weight; `width` bytes an element."""
    moving = (item.output_elements if item.look_up else item.input_elements) * width
    count = panels(grid, mesh)
    return moving / grid.size(mesh.rows) / count, item.weight_bytes / grid.size(mesh.columns) / count


def calls(item: Matmul, grid: Grid, mesh: Summa, width: int, free: bool) -> Iterator[Call]:
    """Yields the collectives of a matmul; a `free` input needs no gradient. Several matmuls of one input each
    broadcast it."""
    count, (moving, weight) = panels(grid, mesh), panel_bytes(item, grid, mesh, width)
    rows, columns = mesh
    for share in item.shares:
        if item.look_up:
            yield Call("broadcast", "forward", rows, weight * share, count)
            yield Call("reduce", "forward", columns, moving, count)
        else:
            yield Call("broadcast", "forward", columns, moving, count)
            yield Call("broadcast", "forward", rows, weight * share, count)
            if not (free or item.cut):
                yield Call("broadcast", "backward", rows, weight * share, count)
                yield Call("reduce", "backward", columns, moving, count)
        if not item.frozen:
            yield Call("broadcast", "backward", columns, moving, count)
            yield Call("reduce", "backward", rows, weight * share, count)


def working_bytes(item: Matmul, grid: Grid, mesh: Summa, width: int) -> float:
    """Returns the bytes of a matmul's passes beyond its own blocks: the panels that are received, or one of them and
    the one that is summed."""
    return sum(panel_bytes(item, grid, mesh, width))
