"""Output that cannot be written: runs and sweeps go on, commands end quietly, and no disk is blamed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import registry
from harness.core.record import RunRecord
from tests import tiers

KEYS = ["model=mlp", "batch.size=16", "batch.micro_batches=4", "steps=2", "warmup=1", "tracker=none"]
FULL = "stdout cannot be written: No space left on device\n"
pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def started(stdout: str, *arguments: str) -> tuple[int, str]:
    """The exit code and stderr of a command whose stdout is a pipe that nobody reads, a full disk, or closed."""
    command = [sys.executable, *arguments]
    if stdout == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as pipe:
        given = {"pipe": pipe, "full": full, "closed": None}[stdout]
        done = subprocess.run(
            command, stdout=given, stderr=subprocess.PIPE, text=True, cwd=registry.ROOT, check=False, timeout=120
        )
    return done.returncode, done.stderr


@pytest.mark.usefixtures("commands", "fork_server")
@pytest.mark.parametrize("stdout", tiers.split(["pipe", "full", "closed"], ["full"]))
def test_a_run_goes_on(stdout: str, tmp_path: Path) -> None:
    ended = started(stdout, "run.py", "engine=single", *KEYS, f"out={tmp_path}")
    record = RunRecord.load(tmp_path / "record.json")
    assert (record.status, record.reason) == ("ok", "")
    assert ended == (0, FULL if stdout == "full" else "")


@pytest.mark.usefixtures("commands", "at_length")
@pytest.mark.parametrize("stdout", ["pipe", "full", "closed"])
def test_a_sweep_goes_on(stdout: str, tmp_path: Path) -> None:
    ended = started(stdout, "run.py", "-m", "mode=simulate", "engine=single,gpipe", *KEYS, f"out={tmp_path}")
    assert ended == (0, FULL if stdout == "full" else "")
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 3


COMMANDS = [
    ["run.py", "--help"],
    ["-u", "run.py", "--cfg", "job"],
    ["-m", "harness.schedule", "gpipe", "stages=40", "micro_batches=100"],
    ["-m", "models.data.text"],
    *(["-m", name, "--help"] for name in ("analysis.torchgpipe", "slurm.status")),
]


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_ends_quietly_where_nobody_reads(command: list[str]) -> None:
    assert started("pipe", *command) == (141, "")


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_says_once_that_the_disk_is_full(command: list[str]) -> None:
    assert started("full", *command) == (1, FULL)


def test_a_pipe_that_is_slow_and_does_not_block_loses_nothing() -> None:
    code = "from harness.host import output; output.protect(); print('x' * 1_000_000)"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=writer, cwd=registry.ROOT) as process:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            assert len(pipe.read()) == 1_000_001
    assert process.returncode == 0


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("sweep", [False, True])
def test_names_of_files_that_are_no_text_are_printed(sweep: bool, tmp_path: Path) -> None:
    """A terminal with strict UTF-8, as most are, has no character for some bytes."""
    out = tmp_path / os.fsdecode(b"a\xff")
    command = [sys.executable, "run.py", *(["-m"] if sweep else []), "mode=plan", "engine=single", *KEYS]
    done = subprocess.run(
        [*command, f"out={out}"], cwd=registry.ROOT, env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"a\udcff" in done.stdout
