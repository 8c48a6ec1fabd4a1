"""What libraries do on the GPUs of tests/support/fake_gpus.py where Python does not see it: torch's DDP, DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.utils import checkpoint

from engines.deepspeed import load_deepspeed
from tests.support.fake_machine import MACHINE, elsewhere, wait_for

UNSEEN = (dist, "_broadcast_coalesced"), (dist.Reducer, "__init__"), (dist.Reducer, "_rebuild_buckets")
"""Of DDP: collectives for which C++ waits before it goes on, and buckets, which it makes on its rank's GPU."""


def patch(patch: pytest.MonkeyPatch) -> None:
    """Makes DDP, and recomputation by torch.utils.checkpoint, know the GPUs."""
    for owner, method in UNSEEN:
        patch.setattr(owner, method, _unseen(getattr(owner, method)))
    patch.setattr(Work, "get_future", _future(Work.get_future))
    # it looks at devices in C++'s hooks, where tensors do not say that they are on a GPU
    patch.setitem(checkpoint._allowed_determinism_checks_to_fns, "default", lambda tensor: (tensor.shape, tensor.dtype))


def _unseen(method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        MACHINE.local.waits = True
        try:
            with elsewhere(MACHINE.device):
                return method(*args, **kwargs)
        finally:
            MACHINE.local.waits = False

    return called


def _future(method: Callable[[Work], Any]) -> Callable[[Work], Any]:
    """`Work.get_future`, as DDP's communication hook returns it."""

    def called(work: Work) -> Any:
        if found := MACHINE.works.get(id(work)):
            MACHINE.local.__dict__.setdefault("futures", []).append(found[0])
        return method(work)

    return called


def reducer_ends() -> None:
    """At the end of a backward pass DDP's reducer has the current stream wait for what its hook has returned."""
    futures: list[str] = MACHINE.local.__dict__.pop("futures", [])
    for stream in futures:
        wait_for(stream)


@contextmanager
def deepspeed_on_gpus() -> Iterator[None]:
    """DeepSpeed takes the GPUs for its accelerator: else it would use no streams."""
    load_deepspeed.load(1)
    from deepspeed.accelerator import cuda_accelerator

    class Accelerator(cuda_accelerator.CUDA_Accelerator):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def available_memory(self, device_index: int | None = None) -> int:
            return 1 << 36

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys.modules["deepspeed.accelerator.real_accelerator"], "ds_accelerator", Accelerator())
        nothing = SimpleNamespace(range_push=lambda message: None, range_pop=lambda: None)
        patched.setattr(torch.cuda, "nvtx", nothing)
        patched.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        yield
