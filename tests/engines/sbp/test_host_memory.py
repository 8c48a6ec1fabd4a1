"""Small tensors through memory that ranks share: every part arrives whole, in its turn, and nothing is left over."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.sbp import host_memory
from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Mesh
from engines.sbp.host_memory import LARGEST, LINE, HostMemory
from harness.launch.failure import LOST_PEER
from harness.launch.forked_ranks import RankKilled, run_on_ranks
from harness.sbp.device_grid import Grid
from tests.support.sbp_blocks import on

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
pytestmark = [
    pytest.mark.usefixtures("ranks"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files without a name"),
]


def part(rank: int, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a rank gives to a gathering."""
    dice = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, 100, tuple(shape), generator=dice).to(dtype)


def memory_of(ranks: Sequence[int]) -> HostMemory:
    found = HostMemory.shared(dist.new_group(list(ranks)))
    assert found is not None
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_parts_of_gatherings_at_random(count: int) -> None:
    """Of any shape and dtype, in any group, with ranks that are late now and then."""

    def gather() -> bool:
        rank, dice, late = dist.get_rank(), random.Random(count), random.Random(dist.get_rank())
        every = [ranks for n in range(2, count + 1) for ranks in combinations(range(count), n)]
        memories = {
            ranks: HostMemory.shared(group) if rank in ranks else None
            for ranks in every
            for group in [dist.new_group(list(ranks))]
        }
        for number in range(300):
            ranks, dtype = dice.choice(every), dice.choice(DTYPES)
            shape = [dice.randint(1, 9) for _ in range(dice.randint(0, 4))]
            memory = memories[ranks]
            if memory is None:
                continue
            if late.random() < 0.05:
                time.sleep(late.random() * 2e-3)
            found = memory.gathered(part(rank, number, shape, dtype))
            if not torch.equal(found, torch.stack([part(one, number, shape, dtype) for one in ranks])):
                return False
        return True

    assert run_on_ranks(count, gather, ("cpu",) * count)


@pytest.mark.fast
def test_no_part_is_torn_or_overtaken() -> None:
    """The largest parts, each of one number, from more ranks than cores: a reader sees all of it, or has not read."""

    def gather() -> bool:
        memory, rank = memory_of(range(4)), dist.get_rank()
        fine = True
        for number in range(400):
            found = memory.gathered(torch.full((LARGEST // 8,), 10.0 * number + rank, dtype=torch.float64))
            if (number + rank) % 16 == 0:
                time.sleep(1e-3)  # others go on to the next one, and write there
            wanted = 10.0 * number + torch.arange(4)
            fine = fine and bool((found == wanted[:, None]).all())
        whole = torch.tensor([float(fine)])
        dist.all_reduce(whole, dist.ReduceOp.MIN)
        return bool(whole)

    assert run_on_ranks(4, gather, ("cpu",) * 4)


def sums(by: BlockCollectives) -> tuple[bool, list[Tensor]]:
    """Of a small tensor, through memory or not."""
    x = part(by.groups.rank, 0, (5, 3), torch.float64)
    there = by.groups.memory((0, 1)) is not None
    found = [by.summed(x, (0, 1)), by.summed(x, (1,)), by.largest(x, (0,)), by.gathered(x, (0, 1)).clone()]
    assert x.equal(part(by.groups.rank, 0, (5, 3), torch.float64)), "the own tensor stays as it is"
    return there, found


def test_sums_and_maxima_are_those_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One member cannot open the memory, as on another host: all have messages instead."""
    opened, host = host_memory._opened, os.getpid()
    shared = on(Mesh(Grid(1, 4)), sums)

    def elsewhere(*file: object) -> object:
        assert os.getpid() != host
        return None if dist.get_rank() == 3 else opened(*file)  # type: ignore[arg-type]

    monkeypatch.setattr(host_memory, "_opened", elsewhere)
    sent = on(Mesh(Grid(1, 4)), sums)
    assert [there for there, _ in shared] == [True] * 4 and [there for there, _ in sent] == [False] * 4
    for (_, own), (_, wanted) in zip(shared, sent, strict=True):
        assert all(map(torch.equal, own, wanted))


@pytest.mark.parametrize("what", ["machine", "token", "host"])
def test_memory_that_cannot_be_trusted_is_none(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that may show stores in another order; a file of that number in another process; other hosts."""
    if what == "machine":
        monkeypatch.setattr("platform.machine", lambda: "aarch64")
    elif what == "host":
        monkeypatch.setattr(host_memory, "_host", lambda: f"host {dist.get_rank()}")
        monkeypatch.setattr(host_memory, "_opened", None)  # nothing is opened
    else:
        monkeypatch.setattr(os, "pread", lambda file, size, start: b"?" * size)

    def ask() -> bool:
        return HostMemory.shared(dist.new_group([0, 1])) is None

    assert run_on_ranks(2, ask, ("cpu",) * 2)


def test_a_wait_for_a_rank_that_has_ended() -> None:
    """Ends soon, with the words by which a lost peer is known; the run says who was killed; no file is left."""
    before = set(os.listdir("/dev/shm"))

    def end() -> str:
        memory = memory_of((0, 1))
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            memory.gathered(torch.ones(1))
        except ConnectionError as error:
            assert LOST_PEER.search(str(error)), error
            raise
        return "gathered"

    with pytest.raises(RankKilled, match="rank 1"):
        run_on_ranks(2, end, ("cpu",) * 2)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "patience", lambda: timedelta(seconds=0.2))

    def wait() -> bool:
        memory = memory_of((0, 1))
        if dist.get_rank() == 0:
            with pytest.raises(TimeoutError, match="has waited"):
                memory.gathered(torch.ones(1))
        dist.barrier()
        return True

    assert run_on_ranks(2, wait, ("cpu",) * 2)


def test_files_are_closed() -> None:
    """Of the memory itself none stays open: a mapping keeps it."""

    def count() -> int:
        group, before = dist.new_group([0, 1]), len(list(Path("/proc/self/fd").iterdir()))
        dist.barrier(group)
        assert HostMemory.shared(group) is not None
        return len(list(Path("/proc/self/fd").iterdir())) - before

    assert run_on_ranks(2, count, ("cpu",) * 2) <= 2, "that of the other process, and a connection of the group"


def test_a_wait_yields_its_core_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most waits are shorter than falling asleep and waking up."""
    memory = HostMemory(mmap.mmap(-1, 2 * LINE + 4 * LARGEST), 0, 2, ())
    memory.number, now, seen = 1, [0.0], ""

    def passes(what: str, seconds: float) -> None:
        nonlocal seen
        seen += what
        now[0] += seconds
        memory.counters[memory.places[1]] = int(len(seen) == 5)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: passes("s", seconds))
    monkeypatch.setattr(host_memory, "time", clock)
    monkeypatch.setattr(host_memory.os, "sched_yield", lambda: passes("y", host_memory.YIELDING_S / 2.5))
    memory._wait(memory.places[1])
    assert seen == "yyyss"
