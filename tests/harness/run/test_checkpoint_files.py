"""Checkpoints as files: whole or not there, two of them, and none that is damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch

from harness.core.run_files import CHECKPOINTS
from harness.run import checkpoint_files
from harness.run.checkpoint_files import (
    after_steps,
    is_whole,
    place,
    remove_all,
    remove_partial,
    set_aside,
    steps,
    write,
)
from harness.worker.checkpoints import Checkpoints
from tests.support.full_disk import full_disk

WEIGHTS = torch.arange(20_000.0)


def save(file: IO[bytes]) -> None:
    torch.save({"weights": WEIGHTS}, file)


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / CHECKPOINTS).iterdir()}


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    assert steps(tmp_path) == []
    for step in (8, 9, 10):
        write(tmp_path, step, save)
    assert steps(tmp_path) == [10, 9], "by number, not by letters"
    assert names(tmp_path) == {"step-9.pt", "step-10.pt"}
    assert [after_steps(step) for step in (1, 2)] == ["after 1 step", "after 2 steps"]


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
    set_aside(tmp_path, 1)
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
    write(tmp_path, 1, save)
    code = f"""
import os, pathlib, signal
from harness.run.checkpoint_files import write
def fill(file):
    file.write(b"x" * 10000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
write(pathlib.Path({str(tmp_path)!r}), 2, fill)
"""
    root = Path(checkpoint_files.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == -signal.SIGKILL
    assert names(tmp_path) == {"step-1.pt", "step-2.part"} and steps(tmp_path) == [1]
    remove_partial(tmp_path)
    assert names(tmp_path) == {"step-1.pt"}
    remove_all(tmp_path)
    assert names(tmp_path) == set()


class Session:
    """As much of one as a checkpoint takes."""

    def state_dict(self) -> dict[str, object]:
        return {"model": {"weight": WEIGHTS}, "optimizer": {}, "step": 2}


def test_on_a_full_disk_the_run_goes_on_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, 1, save)
    said: list[str] = []
    with full_disk(50_000):
        assert not Checkpoints(tmp_path, every=2, say=said.append).after_step(Session(), 2, None, lambda: None)  # type: ignore
    assert names(tmp_path) == {"step-1.pt"}
    assert len(said) == 1 and said[0].startswith("no checkpoint after 2 steps, older ones stay: ")
