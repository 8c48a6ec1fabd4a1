"""What a rank writes of a sharded checkpoint: weights and moments that it has, and blocks of tensors.

whole tensor, 4 x 6        rank 0 has rows 0 and 2: two blocks, of offsets (0, 0) and (2, 0) and sizes (1, 6)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

State = dict[str, Any]
"""{"model": {name: tensor}, "optimizer": {name: {key: value}}}"""


def parted(own: State, parameters: Mapping[str, Tensor], weights: Collection[str]) -> tuple[State, State]:
    """Return what of a rank's state is gathered, and what stays in shards: weights of these names, and moments.

    `parameters` have the names that their optimizer state has; a moment has the parameter's shape, a counter has none.
    Of a weight that several stages have, the one in which it has this name hands in the moments.
    """
    rest: State = {"model": {}, "optimizer": {}}
    shards: State = {"model": {}, "optimizer": {}}
    for name, value in own["model"].items():
        (shards if name in weights else rest)["model"][name] = value
    for name, state in own["optimizer"].items():
        shape = parameters[name].shape
        moments = {key: one for key, one in state.items() if shape and isinstance(one, Tensor) and one.shape == shape}
        shards["optimizer"][name] = moments if name in own["model"] else {}
        rest["optimizer"][name] = {key: one for key, one in state.items() if key not in moments}
    return rest, shards


def flat_blocks(own: Tensor, whole: torch.Size, start: int) -> Blocks:
    """Elements of a flattened tensor, from `start` on: a part of a row, whole rows, and a part of another one."""
    found: dict[torch.Size, Tensor] = {}

    def add(before: tuple[int, ...], sizes: torch.Size, first: int, values: Tensor) -> None:
        """`values` lie from element `first` on in the row of these numbers, which has these sizes."""
        inner = math.prod(sizes[1:])
        while len(values):
            row, within = divmod(first, inner)
            if within or len(values) < inner:
                length = min(inner - within, len(values))
                add((*before, row), sizes[1:], within, values[:length])
            else:
                length = len(values) // inner * inner
                shape = (*(1 for _ in before), length // inner, *sizes[1:])
                found[torch.Size((*before, row, *(0 for _ in sizes[1:])))] = values[:length].view(shape)
            first, values = first + length, values[length:]

    add((), whole, start, own)
    return Blocks(own, whole, found)


class Blocks(Tensor):
    """A rank's part `own` of a tensor of the size `whole`: `blocks` are views of it, by their offsets in the whole.

    torch.distributed.checkpoint reads and writes it, by the methods with underscores; nothing can be computed with it.
    Blocks of two ranks are the same, or do not overlap.
    """

    @staticmethod
    def __new__(cls, own: Tensor, whole: torch.Size, blocks: Mapping[torch.Size, Tensor]) -> Blocks:
        made: Blocks = Tensor._make_wrapper_subclass(cls, whole, dtype=own.dtype, device=own.device)
        return made

    def __init__(self, own: Tensor, whole: torch.Size, blocks: Mapping[torch.Size, Tensor]) -> None:
        self.own, self.blocks = own, blocks

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{function} of blocks")

    def to_local(self) -> Tensor:
        """Return what the rank has, as it has it."""
        return self.own

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.blocks[index.offset]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties, shard = TensorProperties.create_from_tensor(self.own), WriteItemType.SHARD
        return [
            WriteItem(MetadataIndex(name, one.offsets), shard, tensor_data=TensorWriteData(one, properties, self.shape))
            for one in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offset, block.shape) for offset, block in self.blocks.items()]
