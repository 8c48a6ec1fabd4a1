"""launch.profiler: a trace of torch.profiler of each chosen step, with all threads of the process."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.core.run_files import ALL, FOLDERS, PROFILER
from harness.interfaces import Batch, StepMetrics
from harness.launch import forked_ranks
from harness.worker.checkpoints import Checkpoints
from harness.worker.step_profiler import profiled
from harness.worker.training_loop import Loop, train_steps
from tests.harness.worker.test_training_loop import Counting, Session


class Threads(Session):
    """A step multiplies in this thread and in one that is as old as the session, as devices on CPUs are."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.done = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._device, daemon=True).start()

    def _device(self) -> None:
        while True:
            self.begin.acquire()
            torch.mm(torch.ones(3, 3), torch.ones(3, 3))
            self.done.release()

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        self.begin.release()
        self.done.acquire()
        return super().step(batch, meter)


def multiplied(file: Path) -> set[int]:
    """The threads in which a trace has a matmul."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {event["tid"] for event in events if event.get("name") == "aten::mm"}


def test_the_chosen_steps_and_all_of_their_threads(tmp_path: Path) -> None:
    loop = Loop(8, steps=3, warmup=1, profiled=(1, 3))
    train_steps(Threads(), Counting(), loop, tmp_path, Checkpoints(tmp_path))
    files = sorted((tmp_path / PROFILER).iterdir())
    assert [file.name for file in files] == ["step-1-rank-0.json.gz", "step-3-rank-0.json.gz"]
    assert [len(multiplied(file)) for file in files] == [2, 2]


def test_without_the_key_there_is_no_folder(tmp_path: Path) -> None:
    train_steps(Session(), Counting(), Loop(8, steps=2, warmup=1), tmp_path, Checkpoints(tmp_path))
    assert not (tmp_path / PROFILER).exists()
    assert PROFILER in ALL and PROFILER in FOLDERS, "a new run in the folder removes it"


def test_each_rank_has_a_file_of_its_own(tmp_path: Path, ranks: None) -> None:
    def work() -> None:
        with profiled(tmp_path, (5,), 5):
            dist.all_reduce(torch.ones(2))

    forked_ranks.run_on_ranks(2, work, ("cpu", "cpu"))
    files = sorted(file.name for file in (tmp_path / PROFILER).iterdir())
    assert files == ["step-5-rank-0.json.gz", "step-5-rank-1.json.gz"]


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_allocations_are_recorded_in_the_step_alone(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def record(enabled: str | None = "all", stacks: str = "all") -> None:
        called.append(f"record {enabled}")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: called.append(Path(file).name))
    with contextlib.suppress(ZeroDivisionError), profiled(tmp_path, (5,), 5):
        called.append("step")
        if fails:
            raise ZeroDivisionError
    dumped = [] if fails else ["step-5-rank-0.pickle"]
    assert called == ["record all", "step", *dumped, "record None"]


def test_a_step_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profiled(tmp_path, (5,), 5):
        raise ZeroDivisionError
    assert not (tmp_path / PROFILER).exists()
    with profiled(tmp_path, (6,), 6):  # the profiler is free again
        torch.ones(2)
    assert (tmp_path / PROFILER).exists()


def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, path: str) -> None:
        Path(path).write_text("half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    said: list[str] = []
    loop = Loop(8, steps=2, warmup=1, profiled=(1,))
    train_steps(Session(), Counting(), loop, tmp_path, Checkpoints(tmp_path), said.append)
    assert "no profiler/step-1-rank-0.json.gz: [Errno 28] No space left on device" in said
    assert list((tmp_path / PROFILER).iterdir()) == [], "no part of the file"
