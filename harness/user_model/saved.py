"""A module of a process as a file that `model=` takes: training processes, and commands, load it from there.

    runs/modules/3f2a9c01d4e5/Net.py             build(), which needs no other file of the user's
                              3f2a9c01d4e5.pt    the module with its weights, its batch and its loss

Classes and functions of a notebook, of a script or of an interactive session are saved with their code (cloudpickle);
those of modules that can be imported by their names.
"""

from __future__ import annotations

import hashlib
import io
import pickletools
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.user_model import sources
from harness.user_model.load import OURS
from harness.user_model.reference import Reference

CALLABLE = "build"
TEXT = '''\
"""{name}, as it was given to harness.race, plan or simulate."""

from pathlib import Path

from harness.user_model.saved import load


def {callable}():
    return load(Path(__file__).with_name("{digest}.pt"), {folders})
'''
"""The code names the content: it is another model's (`sources.code`) where that is another one."""


def save(model: Any, name: str, folder: Path) -> Reference:
    """Save a module, a wrapper or a model below a folder, in a folder of its own; the same one twice is saved once.

    The file has the name `name`. Raises OSError, and whatever pickle raises for what no other process can have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as new:
        written = Path(new) / "made"
        written.mkdir()
        content = written / "module.pt"
        _write(model, content)
        modules = list(_imported(content))
        digest = _digest(content, modules)
        content.rename(written / f"{digest}.pt")
        folders = sorted({str(_root(module)) for module in modules})
        text = TEXT.format(name=name, digest=digest, callable=CALLABLE, folders=folders)
        (written / f"{name}.py").write_text(text, encoding="utf-8")
        place = (folder / digest).resolve()
        if not (place / f"{name}.py").exists():
            shutil.rmtree(place, ignore_errors=True)
            try:
                written.rename(place)
            except OSError:
                if not (place / f"{name}.py").exists():  # else another process has saved it meanwhile
                    raise
    return Reference(str(place / f"{name}.py"), CALLABLE)


def load(path: Path, folders: Sequence[str]) -> Any:
    """What was saved, with its weights on the current default device; a new object each time.

    Modules of the user's are imported from `folders`, after all others.
    """
    import torch

    sys.path += [folder for folder in folders if folder not in sys.path]
    device = torch.get_default_device()
    return torch.load(path, map_location=device, weights_only=False, mmap=device.type == "meta")


def _write(model: Any, path: Path) -> None:
    """As torch does: tensors that share memory still do when they are loaded."""
    import torch

    from harness.user_model.module_forms import PICKLING

    with path.open("wb") as file:
        torch.save(model, file, pickle_module=PICKLING)


def _digest(path: Path, modules: Sequence[ModuleType]) -> str:
    """Of the content, and of the sources of the user's modules that it imports by name."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
    for module in modules:
        found.update(sources.digest(Reference(str(module.__file__), "module")).encode())
    return found.hexdigest()[: sources.DIGITS]


def _imported(path: Path) -> Iterator[ModuleType]:
    """The modules of the user's that loading a file imports, or may: those whose names stand in the pickle."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        content = archive.read(name)
    texts = (argument for _, argument, _ in pickletools.genops(io.BytesIO(content)) if isinstance(argument, str))
    names = {text.partition(" ")[0] for text in texts}
    for one in sorted(names & {*sys.modules} - {"__main__"}):
        module = sys.modules[one]
        file = getattr(module, "__file__", None) or ""
        if file.endswith(".py") and one.partition(".")[0] not in OURS and not sources.is_installed(_root(module)):
            yield module


def _root(module: ModuleType) -> Path:
    """The folder from which a module is imported."""
    file = Path(str(module.__file__)).resolve()
    return file.parents[module.__name__.count(".") + (file.name == "__init__.py")]
