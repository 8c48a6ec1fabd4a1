"""Random numbers of one task, drawn again exactly in its recomputation, also while other devices draw.

torch's CPU generator is one for the whole process: stages that run at once would mix their draws, and restoring its
state for a recomputation would rewind it for the others. So each task draws from a stream of its own.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_global_generator = threading.Lock()


class TaskRng(TorchDispatchMode):
    """Within it, ops that would draw from torch's global CPU generator draw from a stream that `seed` begins.

    `drew` says whether any did. Ops that are given a generator of their own are left alone.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.drew = False
        self._state: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self.drew = True
        with _global_generator:
            outer = torch.get_rng_state()
            try:
                if self._state is None:
                    torch.default_generator.manual_seed(self.seed)
                else:
                    torch.set_rng_state(self._state)
                result = func(*args, **kwargs)
                self._state = torch.get_rng_state()
            finally:
                torch.set_rng_state(outer)
        return result
