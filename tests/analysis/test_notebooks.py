"""Each notebook's .ipynb is its .py, executed on the committed records without an error."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest

from analysis import pack
from analysis.notebooks import __main__ as notebooks
from analysis.paper_pages import PAGES

FOLDER = notebooks.FOLDER


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_the_notebook_is_in_step_with_its_text(name: str) -> None:
    text, stored = notebooks.read(FOLDER / f"{name}.py"), nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == [
        (cell.cell_type, cell.source) for cell in text.cells
    ]


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_every_cell_was_executed_without_an_error(name: str) -> None:
    stored = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


def test_points_that_are_simulated_in_a_kernel_print_nothing() -> None:
    """rich would display their tables there, past the file that they go to."""
    stored = nbformat.read(FOLDER / "schemes.ipynb", as_version=4)
    assert any("harness import simulate" in cell.source for cell in stored.cells)
    assert {output.output_type for cell in stored.cells for output in cell.get("outputs", ())} == {"execute_result"}


LONG = ("madpipe", "schemes")
"""They simulate for half a minute."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[dict[str, Future[Any]]]:
    """All notebooks, executed in kernels of Jupyter, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(notebooks.execute, FOLDER / f"{name}.py") for name in notebooks.NAMES if name not in LONG
        }


@pytest.mark.parametrize("name", [name for name in notebooks.NAMES if name not in LONG])
def test_it_executes_on_the_committed_records(kernels: dict[str, Future[Any]], name: str) -> None:
    check(name, kernels[name].result().cells)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", LONG)
def test_a_long_one_executes_on_the_committed_records(name: str) -> None:
    check(name, notebooks.execute(FOLDER / f"{name}.py").cells)


def check(name: str, cells: Sequence[Any]) -> None:
    """It has tables, and none that says that a figure has not been run."""
    shown = [output.data for cell in cells for output in cell.get("outputs", ()) if "data" in output]
    assert any("text/html" in data for data in shown)
    if name in PAGES and len(pack.archives_of_sweeps(PAGES[name].sweeps)) == len(PAGES[name].sweeps):
        assert not [data for data in shown if "has not been run." in data.get("text/html", "")]


def test_a_kernel_says_nothing_and_leaves_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, temporary = tmp_path / "small.py", tmp_path / "t"
    path.write_text("# %%\n1 + 1\n")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    notebooks.execute(path)
    assert capfd.readouterr() == ("", "") and not [*temporary.iterdir()]


def test_executing_twice_writes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text("# %% [markdown]\n# # Small\n\n# %%\n1 + 1\n")
    first, second = (notebooks.as_text(notebooks.execute(path)) for _ in range(2))
    assert first == second and '"2"' in first


def test_a_cell_that_fails_fails_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr(notebooks, "NAMES", ("small",))
    (tmp_path / "small.py").write_text("# %%\nraise ValueError('no record')\n")
    assert notebooks.main([]) == 1
    assert "no record" in capsys.readouterr().err and not (tmp_path / "small.ipynb").exists()


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert notebooks.main(["torchgipe"]) == 2
    assert "no notebook is called torchgipe: there are torchgpipe, myelin" in capsys.readouterr().err
