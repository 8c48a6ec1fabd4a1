"""What a rank writes of a sharded checkpoint: parts of a state, blocks of tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from harness.runtime.state_shards import Blocks, flat_blocks, parted


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_elements_of_a_flat_tensor_are_a_few_blocks(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    blocks = flat_blocks(whole.flatten()[start:stop], whole.shape, start)
    assert len(blocks.blocks) <= 2 * len(shape) - 1
    found = torch.full(tuple(shape), -1)
    for offset, block in blocks.blocks.items():
        place = tuple(slice(first, first + size) for first, size in zip(offset, block.shape, strict=True))
        assert (found[place] == -1).all()
        found[place] = block
    assert torch.equal(found.flatten()[start:stop], whole.flatten()[start:stop])
    assert (found != -1).sum() == stop - start


def test_blocks_have_the_size_of_the_whole_and_the_memory_of_the_rank() -> None:
    own = torch.zeros(4)
    blocks = flat_blocks(own, torch.Size([2, 3]), 1)
    assert blocks.size() == (2, 3) and blocks.to_local() is own and blocks.dtype == own.dtype
    blocks.__get_tensor_shard__(MetadataIndex("weight", torch.Size([1, 0]))).fill_(5)
    assert own.tolist() == [0, 0, 5, 5]
    with pytest.raises(NotImplementedError):
        blocks + 1


def test_what_is_gathered_and_what_stays_in_shards() -> None:
    """Moments of a weight that another stage has, too, are handed in where it has its first name."""
    weight, scale, moment, step = torch.zeros(2, 3), torch.tensor(1.0), torch.ones(2, 3), torch.tensor(2.0)
    kept: dict[str, Tensor | None] = {"exp_avg": moment, "step": step, "momentum_buffer": None}
    own = {
        "model": {"head.weight": weight, "scale": scale, "one.weight": weight, "one.mean": torch.zeros(3)},
        "optimizer": {"one.weight": kept, "embedding.weight": kept, "scale": {"exp_avg": step, "step": step}},
    }
    parameters = {"one.weight": weight, "embedding.weight": weight, "scale": scale}
    rest, shards = parted(own, parameters, {"head.weight", "one.weight", "embedding.weight"})
    assert {name: [*values] for name, values in shards["optimizer"].items()} == {
        "one.weight": ["exp_avg"], "embedding.weight": [], "scale": [],
    }  # fmt: skip
    assert [*shards["model"]] == ["head.weight", "one.weight"] and [*rest["model"]] == ["scale", "one.mean"]
    assert {name: [*values] for name, values in rest["optimizer"].items()} == {
        "one.weight": ["step", "momentum_buffer"], "embedding.weight": ["step", "momentum_buffer"],
        "scale": ["exp_avg", "step"],
    }  # fmt: skip


def test_no_blocks_of_nothing() -> None:
    assert isinstance(flat_blocks(torch.zeros(0), torch.Size([2, 3]), 0), Blocks)
    assert flat_blocks(torch.zeros(0), torch.Size([0, 3]), 0).__create_chunk_list__() == []
