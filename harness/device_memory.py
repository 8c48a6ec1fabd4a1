"""Peak memory of one device during one step: the allocator's on CUDA, the exact count of live bytes on CPU."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harness.meter import Meter


class DeviceMemory:
    """Counts from now on. `held` are the tensors that the device holds; enter `counting()` in each of its threads."""

    def __init__(self, device: torch.device, held: Iterable[Tensor]) -> None:
        self.device = device
        self.meter = Meter() if device.type == "cpu" else None
        if self.meter is not None:
            self.meter.add_static(held)
        else:
            torch.cuda.reset_peak_memory_stats(device)

    def counting(self) -> AbstractContextManager[object]:
        return nullcontext() if self.meter is None else self.meter

    def peak_bytes(self) -> int:
        if self.meter is not None:
            return self.meter.peak_bytes
        return torch.cuda.max_memory_allocated(self.device)
