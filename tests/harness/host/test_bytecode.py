"""A compiled file of which a full disk has left a part: what commands and workers say of it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from harness.config import registry
from harness.host import bytecode
from harness.launch.failure import Failure


def damage(source: Path) -> Path:
    """Leave the first half of what Python compiles a file to."""
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(source)], check=True)
    compiled = Path(cache_from_source(str(source)))
    compiled.write_bytes(compiled.read_bytes()[:40])
    return compiled


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "half_compiled.py"
    source.write_text("NAME = 'a name'\n")
    return source


def test_it_names_the_file_and_what_to_delete(module: Path) -> None:
    compiled = damage(module)
    with pytest.raises(EOFError) as caught:
        importlib.import_module("half_compiled")
    said = bytecode.explain(caught.value)
    assert said and str(compiled) in said and said.endswith(f"-> find {compiled.parent} -name '*.pyc' -delete")
    assert Failure.of(caught.value).message == said
    assert bytecode.explain(EOFError("marshal data too short")) is None


@pytest.mark.parametrize("command", [["run.py"], ["-m", "harness.worker"], ["-m", "slurm.status"]])
def test_a_command_says_it_in_a_line(module: Path, command: list[str]) -> None:
    """The module is in place of one that each of them imports."""
    source = module.rename(module.with_name("omegaconf.py"))
    compiled = damage(source)
    done = subprocess.run(
        [sys.executable, *command, "x"], cwd=registry.ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{source.parent}:{registry.ROOT}"},
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"Python cannot import {compiled}: ") and done.stderr.count("\n") == 1
