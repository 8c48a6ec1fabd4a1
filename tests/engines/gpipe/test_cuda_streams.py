"""In which order the copies and the tasks of a pipeline are given to the streams of CUDA devices, without one."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from engines.gpipe import gpipe_module
from engines.gpipe.cuda_streams import COPY_STREAMS, Streams, copy_streams
from engines.gpipe.gpipe_module import GPipe
from engines.gpipe.stage import Stage
from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.gpipe_drivers import run_tensors

CHUNKS = 3
GPUS = tuple(torch.device("cuda", number) for number in range(3))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake_cuda.install(monkeypatch)


def run(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, grad: bool, separate: bool = True) -> Streams:
    """A pass of three stages, which compute on the CPU, with the streams of three GPUs. The log has tasks, too."""
    plain = Stage.run

    def noted(stage: Stage, parts: object, i: int, around: object) -> object:
        cuda.log.append(("task", stage.number, i))
        return plain(stage, parts, i, around)  # type: ignore[arg-type]

    monkeypatch.setattr(Stage, "run", noted)
    pipe = GPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in GPUS)), [1] * len(GPUS), ["cpu"] * len(GPUS), CHUNKS)
    streams = Streams(GPUS, copy_streams(GPUS) if separate else None)
    streams.devices = pipe.devices
    with nullcontext() if grad else torch.no_grad():
        run_tensors(pipe, torch.ones(6, 4), CHUNKS, "never", streams=streams, grad=grad)
    pipe.close()
    return streams


@pytest.mark.parametrize("grad", [True, False])
def test_a_copy_waits_for_the_task_that_makes_what_is_copied(
    grad: bool, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there is no gradient: in an evaluation."""
    streams = run(cuda, monkeypatch, grad)
    for source in range(len(GPUS) - 1):
        for i in range(CHUNKS):
            begins, task = streams._copy(source, i), cuda.place("task", source, i)
            waits = cuda.place("wait", begins, streams._compute[source], after=task)
            assert waits < cuda.place("on", begins, after=task)


def test_the_mark_at_the_begin_of_a_copy_is_not_before_what_is_copied(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = run(cuda, monkeypatch, grad=True)
    for source in range(len(GPUS) - 1):
        for i in range(CHUNKS):
            before, own = streams._copy(source, i), streams._copy(source + 1, i)
            task = cuda.place("task", source, i)
            made = cuda.place("wait", before, streams._compute[source], after=task)
            assert made < cuda.place("wait", own, before, after=task) < cuda.place("mark", own, after=task)


def test_without_copy_streams_copies_are_in_the_compute_streams(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = run(cuda, monkeypatch, grad=True, separate=False)
    assert streams._copy(1, 2) is streams._compute[1] is cuda.current(GPUS[1])


def test_a_pipeline_has_few_copy_streams_and_keeps_them(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator has a pool for each stream of a device: new ones in every step would take its memory."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], ["cpu"] * 2, 32)
    pipe._copy_streams, used = copy_streams(GPUS[:2]), []

    class Pass:
        bytes_sent, recorder = {}, None

        def __init__(self, stages: object, layout: object, streams: Streams, *rest: object) -> None:
            used.append({streams._copy(d, i) for d in range(2) for i in range(32)})

        def run(self, chunks: object) -> torch.Tensor:
            return torch.zeros(1)

    monkeypatch.setattr(gpipe_module, "CudaPass", Pass)
    for _ in range(3):
        pipe._run_cuda_pass([torch.zeros(1, 2)], None, "never", False)  # type: ignore[arg-type]
    pipe.close()
    assert used[0] == used[1] == used[2] and len(used[0]) == 2 * COPY_STREAMS


def test_streams_are_not_copied_with_a_pipeline() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], ["cpu"] * 2, 2)
    pipe._copy_streams = {0: [None]}  # type: ignore[list-item]
    other = copy.deepcopy(pipe)
    assert other._copy_streams == {}
    for one in (pipe, other):
        one.close()
