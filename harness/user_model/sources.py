"""The sources of a user's model: its file, and the modules of the user's that this imports, wherever it does.

Found by reading the files. Modules are looked for next to the file, or below the folder of its package; of an installed
package those of the same package. Their digest is a key of the configuration: a profile is of these sources, and a run
resumes with the same ones.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.core.problem import CannotRun, Problem
from harness.user_model import reference
from harness.user_model.reference import Reference

DIGITS = 12
LIBRARIES = ("site-packages", "dist-packages")


def digest(place: Reference) -> str:
    """Return a hash of the contents of all sources. Raises CannotRun if the file is not there, or cannot be read."""
    found = hashlib.sha256()
    root = root_of(reference.find(place))
    for path in files(place):
        text = _content(path, place)
        found.update(f"{path.relative_to(root)} {len(text)}\n".encode() + text)
    return found.hexdigest()[:DIGITS]


def code(place: Reference) -> str:
    """Return a hash of what the sources say: without comments, documentation and layout, and without the names of the
    folder and of the first file. Raises CannotRun as `digest`."""
    first = reference.find(place)
    root, found = root_of(first), hashlib.sha256()
    for path in sorted(files(place), key=lambda path: (path != first, path)):
        name = "" if path == first else str(path.relative_to(root))
        found.update(f"{name} {_said(_content(path, place))}\n".encode())
    return found.hexdigest()[:DIGITS]


@lru_cache(maxsize=4096)
def _said(text: bytes) -> str:
    """A hash of the statements of a file. A search asks for it again and again, and a folder may have many files."""
    return hashlib.sha256(_statements(text).encode()).hexdigest()


def _statements(text: bytes) -> str:
    """The statements of a file, without texts that stand alone; all of it, if it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return repr(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _documents(one)]
    return ast.dump(tree)


def _documents(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def changed(model: Mapping[str, Any]) -> bool:
    """Whether the sources of a model are others than when its keys were composed; for any other one False."""
    if "callable" not in model or "source" not in model:
        return False
    try:
        return digest(reference.parse(str(model["callable"]))) != model["source"]
    except CannotRun:  # it is not there any more
        return False


def files(place: Reference) -> list[Path]:
    """Return the sources, sorted. Raises CannotRun as `digest`."""
    first = reference.find(place)
    root, found, left = root_of(first), set[Path](), [first]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        _content(path, place)
        left += _imported(path, root, path.stat().st_mtime_ns)
    return sorted(found)


def root_of(path: Path) -> Path:
    """The folder from which a file is imported: its own, or that of the outermost package that it is in."""
    folder = path.parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def is_installed(root: Path) -> bool:
    """Whether modules that are imported from a folder are those of an installed package, or of Python."""
    return any(name in LIBRARIES for name in root.parts) or root.is_relative_to(Path(sys.base_prefix) / "lib")


def module_of(path: Path) -> str:
    """The dotted name of a file, from its root."""
    inside = path.relative_to(root_of(path)).with_suffix("")
    parts = inside.parent.parts if inside.name == "__init__" else inside.parts
    return ".".join(parts)


@lru_cache(maxsize=4096)
def _imported(path: Path, root: Path, changed_ns: int) -> tuple[Path, ...]:
    """The files below a root that a file imports, as it was changed last."""
    if path.suffix != reference.FILE:
        return ()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return ()
    own = module_of(path).split(".")
    package = own if path.name == "__init__.py" else own[:-1]
    wanted = (name for node in ast.walk(tree) for name in _names(node, package))
    same = (name for name in wanted if not is_installed(root) or name.partition(".")[0] == own[0])
    return tuple(sorted({file for name in same for file in _files(name, root)}))


def _names(node: ast.AST, package: list[str]) -> Iterator[str]:
    """The dotted names that a statement imports; what stands after `from x import` may be modules, too."""
    if isinstance(node, ast.Import):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else []
        base = ".".join(filter(None, [*above, node.module]))
        yield from (name for one in node.names if (name := f"{base}.{one.name}".strip(".")))


def _files(name: str, root: Path) -> Iterator[Path]:
    """The files that importing a dotted name runs: its module's, and those of all packages above."""
    place = root
    for part in name.split("."):
        place = place / part
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                yield path
                break


def _content(path: Path, place: Reference) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CannotRun([Problem("model", place.shown, f"cannot be read: {error.strerror} ({path})")]) from error
