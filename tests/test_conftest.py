"""In continuous integration a skipped test is an error, unless it is marked gpu."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SKIPPED = "import pytest\ndef test_a(): pytest.skip('no reason')\ndef test_b(): pass\n"
ALLOWED = """
import pytest
@pytest.mark.gpu
def test_a(): pytest.skip('one GPU is not enough')
@pytest.mark.xfail
def test_b(): assert False
"""
MODULE = "import pytest\npytest.importorskip('no_such_module')\n"


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("text", "ci", "workers", "code"),
    [
        pytest.param(SKIPPED, "true", 0, 1, id="test", marks=pytest.mark.soak),
        pytest.param(MODULE, "true", 0, 1, id="module"),
        pytest.param(SKIPPED, "", 0, 0, id="not in CI"),
        pytest.param(ALLOWED, "true", 0, 0, id="gpu"),
        pytest.param(SKIPPED, "true", 2, 1, id="test of a worker"),
    ],
)
def test_skips(tmp_path: Path, text: str, ci: str, workers: int, code: int) -> None:
    shutil.copy(HERE / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs one\n  full: takes long\n  fast: stays\n")
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "test_other.py").write_text("def test_c(): pass\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"-n{workers}", "."],
        cwd=tmp_path, env=os.environ | {"CI": ci, "PYTHONPATH": str(HERE.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert ("an error where CI=true" in done.stdout) == (code == 1)
