"""Ranks that wait for a turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (makes the backend known)

from harness.launch.turns import TurnGiver
from harness.worker.race_turns import RaceTurns


@pytest.fixture
def other_backend() -> Iterator[None]:
    """A group of one rank whose backend is not gloo, as on GPUs."""
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("other_backend")
def test_ranks_wait_in_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of NCCL that waits keeps the GPU busy, on which another entry is measured."""
    with TurnGiver() as giver:
        for name, value in giver.environment("a").items():
            monkeypatch.setenv(name, value)
        turns = RaceTurns(tmp_path, warmup=0)
        turns._join()
        assert giver.came(5.0) == "a" and turns.ranks and dist.get_backend(turns.ranks) == "gloo"
