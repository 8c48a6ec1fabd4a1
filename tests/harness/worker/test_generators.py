"""Which generators of random numbers a checkpoint has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.worker import checkpoints

SAVED = {number: torch.full((2,), number, dtype=torch.uint8) for number in range(8)}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    """The states of the generators of four GPUs, of which this process's is number 2."""
    states = {number: SAVED[number] for number in range(4)}

    def set_state(state: Tensor, device: int) -> None:
        if device not in states:
            raise IndexError(device)
        states[device] = state

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_state)
    return states


def numbers(states: list[Tensor]) -> list[int]:
    return [int(state[0]) for state in states]


def test_a_rank_saves_the_generator_of_its_own_gpu(gpus: dict[int, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may see another number of them when it resumes: those of another node, or its own alone."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    saved = checkpoints._generators()
    assert numbers(saved["cuda"]) == [2]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    checkpoints._draw_from({"cpu": saved["cpu"], "cuda": [SAVED[7]]})
    assert numbers(list(gpus.values())) == [7, 1, 2, 3]


def test_one_process_resumes_where_it_sees_fewer_gpus(gpus: dict[int, Tensor]) -> None:
    """It uses the first ones, as many as are planned."""
    saved = checkpoints._generators()
    assert numbers(saved["cuda"]) == [0, 1, 2, 3]
    checkpoints._draw_from({"cpu": saved["cpu"], "cuda": [SAVED[7 - number] for number in range(8)]})
    assert numbers(list(gpus.values())) == [7, 6, 5, 4]


def test_without_cuda_there_are_none() -> None:
    assert checkpoints._generators()["cuda"] == []
