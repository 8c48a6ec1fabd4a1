"""Ctrl-C in a command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import registry


@pytest.mark.parametrize("command", ["analysis.losses", "analysis.page", "slurm.status", "harness.report.pattern_plot"])
def test_it_is_a_line_also_in_the_imports(tmp_path: Path, command: str) -> None:
    """Of the interpreter's option that names each module when its import has ended."""
    line = [sys.executable, "-X", "importtime", "-m", command, str(tmp_path)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=registry.ROOT) as process:
        try:
            assert process.stderr
            for text in process.stderr:
                if text.rpartition("|")[2].strip() == "argparse" or "omegaconf" in text:
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert [text for text in rest.splitlines() if "|" not in text] == ["ended by SIGINT"]


def test_who_imports_the_packages_keeps_tracebacks() -> None:
    code = "import analysis, slurm, harness.report, sys; sys.exit(sys.excepthook is not sys.__excepthook__)"
    assert subprocess.run([sys.executable, "-c", code], cwd=registry.ROOT, check=False).returncode == 0
