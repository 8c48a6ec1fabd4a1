"""The sweep of the tutorial, docs/tutorials/slurm_sweep.md: it is submitted, and ends, as the page says."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness.config import registry
from slurm import status, submit
from tests.docs import pages
from tests.docs.test_commands import masked
from tests.slurm.emulated import Cluster, wait_for

RUN_S = 300.0


@pytest.mark.timeout(600)
def test_the_tutorials_sweep(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (registry.ROOT / "docs/tutorials/slurm_sweep.md").read_text(encoding="utf-8")
    submitted, cancelled, *_, ended = [one for one in pages.transcripts(page) if "runs/mlp" in one.commands[0]]
    monkeypatch.chdir(tmp_path)
    assert submit.main([*_arguments(submitted, "python -m slurm.submit "), "steps=2"]) == 0
    printed = [masked(line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in filter(None, submitted.promised) if not _is_printed(line, printed)] == [], printed
    wait_for(cluster.settled, "the array", RUN_S)
    assert status.main(_arguments(ended, "python -m slurm.status ")) == 0
    printed = [masked(line) for line in capsys.readouterr().out.splitlines()]
    assert _is_printed(ended.promised[-1], printed), printed
    assert cancelled.commands[0].startswith("scancel "), "its trials are in test_submit.py"


def _arguments(example: pages.Example, start: str) -> list[str]:
    (command,) = example.commands
    assert command.startswith(start)
    return shlex.split(command.removeprefix(start))


def _is_printed(promised: str, printed: list[str]) -> bool:
    """Of a line with "..." what is before that counts."""
    whole, dots, _ = masked(promised).partition("...")
    return any(line.startswith(whole) if dots else line == whole for line in printed)
