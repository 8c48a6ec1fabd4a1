"""`python -m analysis.notebooks [NAME...]`: execute the notebooks, and write each .ipynb next to its .py."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config import registry
from harness.core import files

FOLDER = Path(__file__).parent
NAMES = ("torchgpipe", "myelin", "madpipe", "autoddl", "schemes", "async_lab")
PATIENCE_S = 300
CLOCKED = ("execution", "executionInfo")
"""Keys of a cell's metadata with the time when it ran."""


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a notebook failed, and says which, else 0."""
    parser = argparse.ArgumentParser("python -m analysis.notebooks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    names = parser.parse_args(arguments).names or NAMES
    unknown = sorted({*names} - {*NAMES})
    if unknown:
        print(f"no notebook is called {', '.join(unknown)}: there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    from nbclient.exceptions import CellExecutionError

    failed = False
    for name in names:
        try:
            executed = execute(FOLDER / f"{name}.py")
        except CellExecutionError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        files.write_text(FOLDER / f"{name}.ipynb", as_text(executed))
        print(f"written to {FOLDER / f'{name}.ipynb'}")
    return 1 if failed else 0


def read(path: Path) -> Any:
    """The notebook of a text in jupytext's percent format; cells are numbered, so that it is the same every time."""
    import jupytext

    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def execute(path: Path) -> Any:
    """The notebook with its outputs; cells run in the checkout. Raises CellExecutionError."""
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook, place = read(path), {"metadata": {"path": str(registry.ROOT)}}
    with tempfile.TemporaryDirectory() as folder:  # of the kernel's sockets, which no other user can open
        sockets = Config({"KernelManager": {"transport": "ipc", "ip": str(Path(folder) / "kernel")}})
        # A kernel that is asked to end races with its own threads and may print a traceback; this one is killed.
        client = NotebookClient(
            notebook, config=sockets, timeout=PATIENCE_S, resources=place, shutdown_kernel="immediate"
        )
        client.execute()
    for cell in notebook.cells:
        for key in CLOCKED:
            cell.metadata.pop(key, None)
    notebook.metadata.pop("language_info", None)
    return notebook


def as_text(notebook: Any) -> str:
    """The .ipynb of a notebook."""
    import nbformat

    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
