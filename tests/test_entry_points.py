"""Every `python -m` command says with --help what it does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("analysis", "engines", "harness", "models", "planners", "slurm", "tests")
SCRIPTS = {
    "harness.export.deepspeed_config",
    "harness.export.pipeline_script",
    "harness.launch.die_with_parent",
    "harness.launch.mpi_helper",
}
"""Files that are started by their path, and take what their parent gives them, and what export=FILE.py writes."""
WITH_TORCH = {"tests.engines.periodic.period"}
GUARD = re.compile(r"^if __name__ ==", re.MULTILINE)


def commands() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    starts = [path for path in found if path.name == "__main__.py" or GUARD.search(path.read_text(encoding="utf-8"))]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in starts}
    return sorted(names - SCRIPTS)


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize("name", commands())
def test_help(name: str, tmp_path: Path) -> None:
    if name not in WITH_TORCH:  # the working directory is searched first
        (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported, which takes seconds')")
    done = subprocess.run(
        [sys.executable, "-m", name, "--help"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert name in done.stdout or f"make {name.rpartition('.')[2]}" in done.stdout
    assert len(done.stdout.split()) > 8 and not done.stderr
