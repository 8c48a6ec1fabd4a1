"""The instruction of one device for each matmul of a chain, and the collectives around it. Free of torch.

arrives --before--> enters --gather--> (rows p0, columns p2) --matmul--> --scatter--> leaves --after--> output_layout
         all-to-all         all-gather                       partial sums  reduce-scatter      all-to-all
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from engines.sbp.block_layout import Digits, Dim, Layout, Mesh
from harness.sbp.matmul_chain import Matmul


class Unrunnable(ValueError):
    """A plan whose layouts this engine cannot convert into each other."""


@dataclass(frozen=True)
class Exchange:
    """A collective over `digits` that takes a tensor from one layout to another."""

    name: str
    digits: Digits
    before: Layout
    after: Layout

    @cached_property
    def reversed(self) -> Exchange:
        """Return the exchange that carries the gradient back."""
        other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(self.name, self.name)
        return Exchange(other, self.digits, self.after, self.before)


@dataclass(frozen=True)
class Instruction:
    """The instruction of a device for one matmul. `inputs` and `outputs` are the digits that split columns and rows of
    its weight, `replicas` the digits over which the weight is replicated. `attended`: attention reads the output, of
    which `heads` says how heads are ordered if one matmul has queries, keys and values. At the end of a branch `past`
    moves the residual to the layout of the sum, and `on` moves the sum on. By SUMMA, with so many `panels`, a matmul
    leaves the blocks in which its input arrives; `inputs` and `outputs` of its weight are split by rows and columns of
    the mesh, of a look-up the other way round (`engines.sbp.summa`)."""

    item: Matmul
    before: Exchange | None
    gather: Exchange | None
    scatter: Exchange | None
    after: Exchange | None
    inputs: Dim
    outputs: Dim
    replicas: Digits
    arrives: Layout
    leaves: Layout
    output_layout: Layout
    heads: int = 0
    attended: bool = False
    past: Exchange | None = None
    on: Exchange | None = None
    panels: int = 0


@dataclass(frozen=True)
class Program:
    """The layout of the model's input, and the instruction of each matmul."""

    start: Layout
    instructions: dict[str, Instruction]

    @property
    def last(self) -> Instruction:
        return list(self.instructions.values())[-1]

    @property
    def end(self) -> Layout:
        return self.last.output_layout if self.instructions else self.start

    @property
    def groups(self) -> set[Digits]:
        """The digits of every collective on activations."""
        found = set()
        for one in self.instructions.values():
            exchanges = (one.before, one.gather, one.scatter, one.after, one.past, one.on)
            found |= {exchange.digits for exchange in exchanges if exchange}
            if one.panels:
                found |= {tuple(sorted(dim.split)) for dim in (one.leaves.rows, one.leaves.columns) if dim.split}
        return found


def undivided(found: Program, mesh: Mesh) -> list[str]:
    """Report tensors that do not divide evenly: an axis must be split in the same way everywhere, so that blocks can be
    joined."""
    wrong = []
    for name, one in found.instructions.items():
        sizes = [
            ("samples", one.item.samples, max((one.arrives.rows, one.leaves.rows, one.output_layout.rows), key=_axes)),
            ("outputs", one.item.divided, max((one.outputs, one.leaves.columns), key=_axes)),
            ("inputs", one.item.inputs, one.inputs),
        ]
        if one.panels:  # rows and columns of the mesh both split what is summed over
            summed, size = ("outputs", one.item.divided) if one.item.look_up else ("inputs", one.item.inputs)
            sizes += [(summed, size, dim) for dim in (one.leaves.rows, one.leaves.columns)]
        wrong += [
            f"{size} {what} of {name} are not divisible by {mesh.size(dim.axes)}"
            for what, size, dim in sizes
            if size % mesh.size(dim.axes)
        ]
    return wrong


def _axes(dim: Dim) -> int:
    return len(dim.axes)
