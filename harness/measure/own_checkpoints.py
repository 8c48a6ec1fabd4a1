"""What the backward passes of layers make again that recompute a part of themselves by torch.utils.checkpoint.

forward    |== input of the part: autograd saves it ==|
backward                                          |= what autograd saves of the part =|

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils import checkpoint as checkpointing


class Recomputed:
    """The most bytes that one such part saves, of those that run within `noting`; `known` storages are there anyway."""

    def __init__(self, known: Container[int]) -> None:
        self.bytes = 0
        self._known = known

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around a forward pass."""
        outer = self

        class Hook(checkpointing._checkpoint_hook):
            def __init__(self, frame: Any) -> None:
                super().__init__(frame)
                pack, sizes, kept = self.pack_hook, dict[int, int](), list[Any]()

                def noted(tensor: Tensor) -> Any:
                    storage = tensor.untyped_storage()
                    sizes[storage._cdata] = 0 if storage._cdata in outer._known else storage.nbytes()
                    kept.append(storage)  # so that no key comes again
                    outer.bytes = max(outer.bytes, sum(sizes.values()))
                    return pack(tensor)

                self.pack_hook = noted

        with patch.object(checkpointing, "_checkpoint_hook", Hook):
            yield
