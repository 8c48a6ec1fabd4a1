"""Blocks of small tensors, and exchanges of them at random, for tests of collectives."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engines.sbp.block_collectives import BlockCollectives, Groups, column_of
from engines.sbp.block_layout import Layout, Mesh
from engines.sbp.instruction import Exchange
from harness.launch.forked_ranks import run_on_ranks
from harness.runtime.collectives import CollectiveCounter

T = TypeVar("T")


def exchanger(mesh: Mesh, first: int = 0) -> BlockCollectives:
    """Of this rank, with a group for every set of digits; the mesh begins at rank `first`."""
    groups = Groups(mesh, first, dist.get_rank() - first)
    every = [some for n in range(1, len(mesh.all) + 1) for some in combinations(mesh.all, n)]
    for use in ("activations", "gradients"):
        groups.make(use, every, dist.get_world_size())
    return BlockCollectives(mesh, groups, CollectiveCounter(time.perf_counter))


def on(mesh: Mesh, work: Callable[[BlockCollectives], T]) -> list[T]:
    """What `work` returned in every rank of a mesh."""

    def gathered() -> list[T]:
        found: list[T | None] = [None] * mesh.devices
        dist.all_gather_object(found, work(exchanger(mesh)))
        return found  # type: ignore[return-value]

    return run_on_ranks(mesh.devices, gathered, ("cpu",) * mesh.devices)


def block(whole: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """A rank's, by plain slicing."""
    rows, columns = indices(whole.shape, layout, mesh, rank)
    return whole.index_select(0, rows).index_select(column_of(whole), columns)


def indices(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> tuple[Tensor, Tensor]:
    column = column_of(torch.empty(shape, device="meta"))
    found = layout.rows.mine(shape[0], mesh, rank), layout.columns.mine(shape[column], mesh, rank)
    return torch.from_numpy(found[0].copy()), torch.from_numpy(found[1].copy())


def walk(mesh: Mesh, steps: int, dice: random.Random) -> list[Exchange]:
    """Exchanges at random, each from where the one before ended: digits are merged, split, and change sides."""
    at, found = Layout(), []
    while len(found) < steps:
        name = dice.choice(("all_gather", "reduce_scatter", "all_to_all"))
        split = at.rows.split | at.columns.split
        possible = [d for d in mesh.all if (d in split) != (name == "reduce_scatter")]
        digits = tuple(digit for digit in possible if dice.random() < 0.6)
        if not digits:
            continue
        mixed = list(digits)
        dice.shuffle(mixed)
        if name == "all_gather":
            after = at.merged(digits)
        elif name == "reduce_scatter":
            cut = dice.randint(0, len(mixed))
            after = at.split(rows=tuple(mixed[:cut]), columns=tuple(mixed[cut:]))
        else:
            joining = tuple(digit for digit in mixed if digit in at.columns.split)
            leaving = tuple(digit for digit in mixed if digit in at.rows.split)
            rows = at.rows.with_split(joining).without(leaving)
            after = Layout(rows, at.columns.with_split(leaving).without(joining))
        found.append(Exchange(name, digits, at, after))
        at = after
    return found


def exchanged(blocks: Sequence[Tensor], whole: Sequence[int], exchange: Exchange, mesh: Mesh) -> list[Tensor]:
    """What every rank has after an exchange, by plain slicing, differentiably: sums for a reduce_scatter, else pieces.

    `whole` is the shape of the tensor that the blocks are of.
    """
    column = column_of(blocks[0])
    found = []
    for rank in range(mesh.devices):
        mine = indices(whole, exchange.after, mesh, rank)
        total = 0
        for member in mesh.group(rank, exchange.digits):
            theirs = indices(whole, exchange.before, mesh, member)
            here = [wanted[:, None] == there[None, :] for wanted, there in zip(mine, theirs, strict=True)]
            rows, columns = (one.to(blocks[0].dtype) for one in here)  # picks what this member has of it
            part = torch.tensordot(rows, blocks[member], ([1], [0]))
            total = total + torch.tensordot(part, columns, ([column], [1])).movedim(-1, column)
        found.append(total)
    return found  # type: ignore[return-value]
