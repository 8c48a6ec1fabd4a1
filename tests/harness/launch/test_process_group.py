"""How a process joins the group of the ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.launch import process_group


@pytest.mark.parametrize(("device", "backend", "loading"), [("cuda:1", "nccl", "EAGER"), ("cpu", "gloo", None)])
def test_kernels_of_a_gpu_are_loaded_before_they_are_needed(
    device: str, backend: str, loading: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA looks at the variable once, when it starts: at the first call that needs a GPU."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: seen.update(loading=os.environ["CUDA_MODULE_LOADING"]))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **keys: seen.update(backend=name, **keys))
    process_group.join(2, 4, device, 1, store=None)
    assert (seen["backend"], seen.get("loading"), seen["rank"], seen["world_size"]) == (backend, loading, 2, 4)
    assert os.environ.get("CUDA_MODULE_LOADING") == loading
