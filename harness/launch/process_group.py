"""The torch.distributed group of the ranks of a run, however these were started."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from harness.host import devices
from harness.runtime.collectives import patience

ON_GPUS = "cpu:gloo,cuda:nccl"
"""Tensors on GPUs go by NCCL. What is pickled (states, reports) goes by gloo: NCCL would copy it to the GPU first, and
rank 0 would have there as much as all ranks send."""


def join(rank: int, count: int, device: str, local: int, **rendezvous: Any) -> None:
    """Make this process rank `rank` of the group of `count`, number `local` of its node.

    A rank has one intra-op thread, on a GPU its share of the cores, unless OMP_NUM_THREADS is set. On a GPU LOCAL_RANK,
    which libraries take for the number of their GPU, is that of `device`: Slurm may show each rank one GPU only.
    `rendezvous` is torch's: a `store` or an `init_method`.
    """
    here = torch.device(device)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(local)}
    if here.type == "cuda":
        os.environ["LOCAL_RANK"] = str(here.index)
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # a kernel that is loaded late waits for NCCL's, which wait for it
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # 8 queues: streams of messages wait for others
        torch.cuda.set_device(here)
        rendezvous["device_id"] = here
    else:
        torch.set_num_threads(1)
    backend = ON_GPUS if here.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=patience(), world_size=count, rank=rank, **rendezvous)
    if here.type == "cuda":
        if rank == 0:
            print(f"all {count} ranks have met", flush=True)  # it can take minutes: the run goes on
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(_share_of_cores(count))


def _share_of_cores(count: int) -> int:
    """Collective: the cores that this rank may use, divided by the ranks of its host that may use the same ones."""
    everyones: list[Any] = [None] * count
    dist.all_gather_object(everyones, (socket.gethostname(), devices.affinity()))
    mine = everyones[dist.get_rank()]
    return max(1, len(mine[1]) // everyones.count(mine))


def is_first_rank() -> bool:
    """True in the process that reports: rank 0, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0
