"""`sharded_state` hands out the tensors that training goes on with: a checkpoint in shards needs no further memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.interfaces import Session
from harness.runtime.state_shards import Blocks
from tests.engines.test_sharded_checkpoints import HERE, SHARDED, on_ranks

pytestmark = pytest.mark.usefixtures("ranks")


def storages(value: Any) -> Iterator[int]:
    """Where the memory of a rank's shards begins."""
    if isinstance(value, dict):
        for one in value.values():
            yield from storages(one)
    elif isinstance(value, Blocks):
        yield from (one.untyped_storage().data_ptr() for one in (value.own, *value.blocks.values()))
    elif isinstance(value, DTensor):
        yield value.to_local().untyped_storage().data_ptr()
    elif isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr()


@pytest.mark.full
@pytest.mark.parametrize("name", HERE)
def test_shards_are_the_tensors_of_the_session(name: str) -> None:
    """Two states that are there at the same time have the same memory; copies would have memory of their own."""
    case = SHARDED[name]()

    def compare(session: Any) -> tuple[int, bool]:
        torch.manual_seed(3)
        session.step(case.model.sample(case.samples))
        _, first = session.sharded_state()
        _, second = session.sharded_state()
        here, again = [*storages(first)], [*storages(second)]
        return len(here), here == again

    def on_each(session: Session) -> list[tuple[int, bool]]:
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, compare(session))
        return found

    found = on_ranks(case, on_each)
    assert any(count for count, _ in found), "some rank has shards"
    assert all(same for _, same in found)
