"""Random numbers of one task, drawn again exactly in its recomputation, also while other threads draw.

torch's CPU generator is one for the whole process: stages that run at once would mix their draws, and restoring its
state for a recomputation would rewind it for the others. So each task draws from a stream of its own.
"""

from __future__ import annotations

import inspect
import threading
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GENERATOR = {"generator": "Optional[Generator]"}
_global_generator = threading.Lock()


class TaskRng(TorchDispatchMode):
    """Within it, ops that would draw from torch's global CPU generator draw from a stream that `seed` begins.

    `drew` says whether any did: one that may draw need not, as attention without dropout. Ops that are given a
    generator of their own are left alone.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)
        self.drew = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled layers stay compiled within it (`precision.compile`)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        overload, before = _with_generator(func), self.generator.get_state()
        if overload is None:
            result = self._in_place_of_the_global_one(func, args, kwargs)
        else:
            result = overload(*args, **kwargs | {"generator": self.generator})
        if not torch.equal(before, self.generator.get_state()):
            self.drew = True
            _refuse_checkpoint()
        return result

    def _in_place_of_the_global_one(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For ops that take no generator."""
        with _global_generator:
            outer: Tensor = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                result = func(*args, **kwargs)
                self.generator.set_state(torch.get_rng_state())
            finally:
                torch.set_rng_state(outer)
        return result


def global_state() -> Tensor:
    """Returns the state of torch's global CPU generator; not while an op of a task draws in its place."""
    with _global_generator:
        return torch.get_rng_state()


def _refuse_checkpoint() -> None:
    """Raise RuntimeError inside of torch's checkpoint: it would draw again from the global generator."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            raise RuntimeError(
                "torch.utils.checkpoint inside of a layer draws random numbers, and its recomputation would draw "
                "others than this task of the pipeline -> harness.nn.dropout.Dropout for nn.Dropout, or no checkpoint "
                "inside of layers: that of the pipeline (checkpoint='always') draws the same again"
            )
        frame = frame.f_back


@cache
def _with_generator(func: Any) -> Any:
    """The overload of the same op that takes a generator, too; None if there is none."""
    wanted = _arguments(func)
    if "generator" in wanted:
        return func
    packet = func.overloadpacket
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((one for one in overloads if _arguments(one) == wanted | GENERATOR), None)


def _arguments(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}
