"""Every module can be imported, and every `python -m` command says with --help what it does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("analysis", "engines", "harness", "models", "planners", "slurm", "tests")
SCRIPTS = {
    "analysis.bench.before",
    "harness.export.deepspeed_config",
    "harness.export.pipeline_script",
    "harness.launch.die_with_parent",
    "harness.launch.hosts.agent",
    "harness.launch.hosts.starter",
    "harness.launch.joined.herald",
    "harness.launch.mpi_helper",
}
"""What only the project itself starts, with what it gives them, and what export=FILE.py writes."""
WITH_TORCH = {"tests.engines.periodic.period"}
IMPORT = "import importlib, sys; list(map(importlib.import_module, sys.argv[1:]))"
CELL = re.compile(r"^# %%", re.MULTILINE)
"""In a notebook: it computes when it is imported."""
GUARD = re.compile(r"^if __name__ ==", re.MULTILINE)


def files() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def commands() -> list[str]:
    starts = [path for path in files() if path.name == "__main__.py" or GUARD.search(path.read_text(encoding="utf-8"))]
    return sorted({module(path).removesuffix(".__main__") for path in starts} - SCRIPTS)


@pytest.mark.fast
@pytest.mark.usefixtures("commands")
def test_every_module_is_imported() -> None:
    found = [path for path in files() if path.name != "__main__.py" and ROOT / "tests" not in path.parents]
    names = sorted(module(path) for path in found if not CELL.search(path.read_text(encoding="utf-8")))
    subprocess.run([sys.executable, "-c", IMPORT, *names], cwd=ROOT, check=True)


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
