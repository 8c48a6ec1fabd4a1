"""Values of tensors that depend on sizes alone, kept for fake ones: positions, causal masks.

Code that looks at such a value (`if (places[1:] > places[:-1]).all()`) goes the way that it goes without a recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from harness.capture.structure import built, template, tensors

LARGEST = 1 << 22
"""Elements of a tensor whose value is kept."""
READS = ("__bool__", "__contains__", "__float__", "__index__", "__int__", "equal", "item", "numpy", "tolist")
"""Functions whose result is a value."""


class KnownValues:
    """The values of some fake tensors, in tensors that share memory as the fake ones do."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[int, Tensor]] = {}

    def has(self, tensor: Tensor) -> bool:
        """Whether the value of a tensor is known."""
        return id(tensor) in self._values

    def has_all(self, given: list[Tensor]) -> bool:
        """Whether the values of all arguments are."""
        return all(map(self.has, given))

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function gives for the values of its arguments."""

        def value(leaf: Any) -> Any:
            return self._values[id(leaf)][1] if isinstance(leaf, Tensor) else leaf

        real_args, real_kwargs = (built(template(each, value), lambda leaf: leaf) for each in (args, kwargs))
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            return function(*real_args, **real_kwargs)

    def extend(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Keep the values of a function's result, if they are not too large, and of what it changes in place; those of
        its arguments are known."""
        made = tensors(result)
        if sum(tensor.numel() for tensor in made) > LARGEST:
            return
        for fake, real in zip(made, tensors(self.run(function, args, kwargs)), strict=True):
            self._values[id(fake)] = fake.untyped_storage()._cdata, real

    def forget(self, changed: list[Tensor]) -> None:
        """Of tensors that were changed to unknown values, and of all that show their memory."""
        storages = {tensor.untyped_storage()._cdata for tensor in changed}
        for identity in [key for key, (storage, _) in self._values.items() if storage in storages]:
            del self._values[identity]
