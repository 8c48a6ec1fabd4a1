"""The torch.distributed group of the ranks of a run, however these were started."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
import torch.distributed as dist

from harness.runtime.transports.transport import PATIENCE

Backend = Literal["gloo", "nccl"]


def join(rank: int, count: int, device: str, local: int, **rendezvous: Any) -> None:
    """Make this process rank `rank` of the group of `count`, number `local` of its node.

    `rendezvous` is torch's: a `store` or an `init_method`.
    """
    kind = torch.device(device).type
    backend: Backend = "nccl" if kind == "cuda" else "gloo"
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(local)}
    if kind == "cuda":
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # a kernel that is loaded late waits for NCCL's, which wait for it
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=PATIENCE, world_size=count, rank=rank, **rendezvous)


def is_first_rank() -> bool:
    """True in the process that reports: rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
