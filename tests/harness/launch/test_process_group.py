"""How a process joins the group of the ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.host import devices
from harness.launch import process_group


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `join` says to torch, and the environment, which is empty before."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: seen.update(loading=os.environ["CUDA_MODULE_LOADING"]))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: seen.update(threads=count))
    monkeypatch.setattr(dist, "init_process_group", lambda name, **keys: seen.update(backend=name, **keys))
    monkeypatch.setattr(dist, "get_rank", lambda: seen["rank"])
    seen["others"] = []

    def gather(everyones: list[Any], own: Any) -> None:
        everyones[:] = [(own[0] if here else "elsewhere", cores) for here, cores in seen["others"]]
        everyones[len(everyones) :] = [own] * (seen["world_size"] - len(everyones))

    monkeypatch.setattr(dist, "all_gather_object", gather)
    return seen


@pytest.mark.parametrize(("device", "loading"), [("cuda:1", "EAGER"), ("cpu", None)])
def test_kernels_of_a_gpu_are_loaded_before_they_are_needed(
    device: str, loading: str | None, joined: dict[str, Any]
) -> None:
    """CUDA looks at the variable once, when it starts: at the first call that needs a GPU."""
    process_group.join(2, 4, device, 1, store=None)
    assert (joined.get("loading"), joined["rank"], joined["world_size"]) == (loading, 2, 4)
    assert os.environ.get("CUDA_MODULE_LOADING") == loading


@pytest.mark.parametrize("given", [None, "8"])
def test_each_stream_of_a_gpu_has_a_queue_of_its_own(given: str | None, joined: dict[str, Any]) -> None:
    """Unless the user wants it otherwise."""
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": given} if given else {}
    process_group.join(0, 2, "cuda:0", 0, store=None)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == (given or "32")


def test_what_is_pickled_does_not_go_through_gpus(joined: dict[str, Any]) -> None:
    """torch takes gloo for objects where it is there, and the rank's own GPU for all that is collective."""
    process_group.join(2, 4, "cuda:1", 2, store=None)
    assert joined["backend"] == "cpu:gloo,cuda:nccl" and joined["device_id"] == torch.device("cuda:1")


def test_without_gpus_there_is_gloo_alone(joined: dict[str, Any]) -> None:
    process_group.join(2, 4, "cpu", 2, store=None)
    assert joined["backend"] == "gloo" and "device_id" not in joined


@pytest.mark.parametrize(("device", "local"), [("cuda:0", "0"), ("cuda:3", "3"), ("cpu", "2")])
def test_libraries_take_the_gpu_that_the_rank_sees(device: str, local: str, joined: dict[str, Any]) -> None:
    """Slurm may show rank 2 of a node its own GPU alone, which is cuda:0 there."""
    process_group.join(2, 4, device, 2, store=None)
    assert os.environ["LOCAL_RANK"] == local


ALL = tuple(range(64))


@pytest.mark.parametrize(
    ("device", "own", "others", "threads"),
    [
        ("cuda:7", ALL, [(True, ALL)] * 7, 8),
        ("cuda:1", ALL, [(False, ALL)] * 6 + [(True, ALL)], 32),
        ("cuda:0", ALL[56:], [(True, ALL[8 * n : 8 * n + 8]) for n in range(7)], 8),
        ("cuda:3", ALL[:2], [(True, ALL[:2])] * 7, 1),
        ("cpu", ALL, [(True, ALL)] * 7, 1),
    ],
    ids=["a node", "two ranks of a node, others elsewhere", "Slurm binds each", "few cores", "CPU"],
)
def test_ranks_share_the_cores(
    device: str, own: Any, others: Any, threads: int, joined: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "affinity", lambda: own)
    joined["others"] = others
    process_group.join(7, 8, device, 0, store=None)
    assert joined["threads"] == threads


def test_threads_that_the_user_sets_stay(joined: dict[str, Any]) -> None:
    os.environ["OMP_NUM_THREADS"] = "3"
    process_group.join(0, 2, "cuda:0", 0, store=None)
    assert "threads" not in joined
