"""Checkpoints as files: whole or not there, two of them, and none that is damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import pytest
import torch

from harness.core.plan import Plan
from harness.core.run_files import CHECKPOINTS
from harness.interfaces import StepMetrics
from harness.run import checkpoint_files
from harness.run.checkpoint_files import (
    RunState,
    Unusable,
    after_steps,
    has_usable,
    place,
    read,
    steps,
    tidy,
)
from harness.worker.checkpoints import Checkpoints, Metered, NotLoaded, When
from tests.support.full_disk import full_disk

WEIGHTS = torch.arange(20_000.0)


def save(file: IO[bytes]) -> None:
    torch.save({"weights": WEIGHTS}, file)


def write(run_dir: Path, step: int, fill: Callable[[IO[bytes]], None]) -> None:
    checkpoint_files.write(run_dir, state_of(step), fill)


def state_of(step: int) -> RunState:
    return RunState(step, {"seed": 0}, {"stages": []}, "id", {}, tuple(f'{{"step": {k}}}' for k in range(step)))


def is_whole(run_dir: Path, step: int) -> bool:
    try:
        return read(run_dir, step).lines == state_of(step).lines
    except Unusable:
        return False


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / CHECKPOINTS).iterdir()}


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert steps(tmp_path) == []
    for step in (8, 9, 10):
        write(tmp_path, step, save)
    assert steps(tmp_path) == [10, 9], "by number, not by letters"
    assert names(tmp_path) == {"step-9.pt", "step-10.pt"}
    assert [after_steps(step) for step in (1, 2)] == ["after 1 step", "after 2 steps"]


def test_there_are_never_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the writer is killed as soon as the new one is there."""
    seen = []
    monkeypatch.setattr(checkpoint_files, "_sync", lambda folder: seen.append(steps(folder.parent)))
    for step in (8, 9, 10, 11):
        write(tmp_path, step, save)
    assert seen == [[8], [9, 8], [10, 9], [11, 10]]


def test_the_newest_is_that_of_most_steps_whatever_the_clock_said(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, save)
        os.utime(place(tmp_path, step), (0, 1e9 - step))
    write(tmp_path, 3, save)
    assert steps(tmp_path) == [3, 2]


@pytest.mark.parametrize("where", [0.02, 0.5, 0.97])
def test_a_flipped_byte_is_found(tmp_path: Path, where: float) -> None:
    write(tmp_path, 1, save)
    assert is_whole(tmp_path, 1)
    path = place(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 0xFF
    path.write_bytes(data)
    assert not is_whole(tmp_path, 1)


@pytest.mark.parametrize("size", [0, 100, 40_000])
def test_so_is_one_that_is_cut_off(tmp_path: Path, size: int) -> None:
    write(tmp_path, 1, save)
    os.truncate(place(tmp_path, 1), size)
    assert not is_whole(tmp_path, 1)
    assert not has_usable(tmp_path)
    tidy(tmp_path, [1])
    assert steps(tmp_path) == [] and names(tmp_path) == {"step-1.damaged"}, "it is out of the way, not gone"


def test_an_error_in_writing_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 1, save)

    def broken(file: IO[bytes]) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(tmp_path, 2, broken)
    assert names(tmp_path) == {"step-1.pt"} and is_whole(tmp_path, 1)


def test_a_writer_that_is_killed_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 2, save)
    code = f"""
import os, pathlib, signal
from harness.run.checkpoint_files import RunState, write
def fill(file):
    file.write(b"x" * 10000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write(pathlib.Path({str(tmp_path)!r}), RunState(1, lines=('{{"step": 0}}',)), fill)
"""
    root = Path(checkpoint_files.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == -signal.SIGKILL
    assert names(tmp_path) == {"step-2.pt", "step-1.part"} and steps(tmp_path) == [2]
    tidy(tmp_path, [])
    assert names(tmp_path) == {"step-2.pt"}


class Session:
    """As much of one as a checkpoint takes."""

    pass_modules, plan = torch.nn.Module(), Plan.contiguous([1])
    module_names: ClassVar[dict[str, str]] = {}

    def state_dict(self) -> dict[str, object]:
        return {"model": {"weight": WEIGHTS}, "optimizer": {}, "step": 2}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["step"] == 2


def test_memory_that_was_metered_before_is_known_to_a_run_that_resumes(tmp_path: Path) -> None:
    metered = Metered([10, 20], [30, 40])
    Checkpoints(tmp_path, when=When(end=True)).after_step(Session(), 2, 2, metered, state_of(2).lines)  # type: ignore[arg-type]
    assert Checkpoints(tmp_path, start=2).load(Session()) == metered  # type: ignore[arg-type]
    assert metered.after(StepMetrics(1.0, 1.0)) == metered
    assert metered.after(StepMetrics(1.0, 1.0, {}, [1, 2], None)) == Metered([1, 2], [30, 40])


def test_on_a_full_disk_the_run_continues_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, 1, save)
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, when=When(every=2), say=said.append)
    lines = state_of(2).lines
    with full_disk(50_000):
        assert not checkpoints.after_step(Session(), 2, 3, Metered(), lines)  # type: ignore[arg-type]
    assert names(tmp_path) == {"step-1.pt"}
    assert len(said) == 1 and said[0].startswith("no checkpoint after 2 steps, older ones stay: ")
    assert checkpoints.error
    assert checkpoints.error["needed_bytes"] == pytest.approx(place(tmp_path, 1).stat().st_size, rel=0.2)
    assert checkpoints.error["free_bytes"] > 0 and "large" in checkpoints.error["message"]
    assert not checkpoints.after_step(Session(), 2, 3, Metered(), lines)  # type: ignore[arg-type]
    assert checkpoints.error is None and is_whole(tmp_path, 2)


def test_torch_reads_a_checkpoint_with_its_run_inside(tmp_path: Path) -> None:
    write(tmp_path, 1, save)
    for mmap in (False, True):
        assert torch.equal(torch.load(place(tmp_path, 1), weights_only=True, mmap=mmap)["weights"], WEIGHTS)


def test_any_changed_byte_that_torch_would_see_is_found(tmp_path: Path) -> None:
    """Beginning and end of the file: headers, checksums, the directory; what is in between has checksums."""
    write(tmp_path, 1, save)
    path = place(tmp_path, 1)
    data = path.read_bytes()
    unseen = 0
    for where in [*range(0, 800, 3), *range(len(data) - 1500, len(data), 5)]:
        path.write_bytes(data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :])
        if is_whole(tmp_path, 1):
            unseen += 1
            assert torch.equal(torch.load(path, weights_only=True, mmap=True)["weights"], WEIGHTS)
    assert unseen < 300, "padding and times"


class Evil:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 7",)


def test_one_that_runs_code_is_not_loaded_and_torchs_advice_is_not_passed_on(tmp_path: Path) -> None:
    """Also where its checksums are right."""
    write(tmp_path, 1, lambda file: torch.save({"session": Evil()}, file))
    with pytest.raises(NotLoaded) as caught:
        Checkpoints(tmp_path, start=1).load(Session())  # type: ignore[arg-type]
    assert str(place(tmp_path, 1)) in str(caught.value) and "weights_only" not in str(caught.value)
