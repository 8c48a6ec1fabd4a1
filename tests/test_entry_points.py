"""Every `python -m` command says with --help what it does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("analysis", "engines", "harness", "models", "planners", "slurm")
SCRIPTS = {"harness.launch.die_with_parent", "harness.launch.mpi_helper"}
"""Files that are started by their path, and take what their parent gives them."""


def commands() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found += [ROOT / "tests" / name for name in ("matrix.py", "mutants.py", "soak.py")]
    guarded = [path for path in found if re.search(r"^if __name__ ==", path.read_text(), re.MULTILINE)]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in guarded}
    return sorted(names - SCRIPTS)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("name", commands())
def test_help(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert name in done.stdout or f"make {name.rpartition('.')[2]}" in done.stdout
    assert len(done.stdout.split()) > 8 and not done.stderr
