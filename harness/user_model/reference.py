"""Where the callable is that makes a user's model: `net.py:build`, `package.module:build`. Does not import torch.

as typed                     from /home/me                     as it is kept
net.py:build                 a file                            /home/me/net.py:build
nets.small:build             a module below /home/me           /home/me:nets.small:build
torchvision.models:alexnet   a module that Python finds        torchvision.models:alexnet
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from harness.config import registry
from harness.core.problem import CannotRun, Fix, Problem, spelled

KEY = "model="
FILE = ".py"
QUOTES = ("'", '"')
PLAIN = re.compile(r"[\w./:~+-]+")
"""What neither the shell nor Hydra would read as something else."""
CHOICE = re.compile(r"choice\((.*)\)", re.DOTALL)
AFTER_NAME = re.compile(r"(?<=:)(\w+(?:\.\w+)*),")
"""A comma after `:NAME`, where another model may begin."""


@dataclass(frozen=True)
class Reference:
    """`place` is the absolute path of a file, or the dotted name of a module, which is below `folder` unless Python
    finds it anyway; `name` is that of the callable in it, "build" or "Net.small"."""

    place: str
    name: str
    folder: str = ""

    @property
    def is_file(self) -> bool:
        return self.place.endswith(FILE)

    @property
    def text(self) -> str:
        """The reference as it is kept: it means the same in every working directory."""
        return ":".join(filter(None, (self.folder, self.place, self.name)))

    @property
    def title(self) -> str:
        """Short, for tables and pictures: "net.py:build"."""
        return f"{os.path.basename(self.place)}:{self.name}"

    @property
    def shown(self) -> str:
        """As the user would type it here: below the working directory without that."""
        here = os.getcwd()
        below = self.is_file and self.place.startswith(f"{here}{os.sep}")
        return f"{os.path.relpath(self.place, here) if below else self.place}:{self.name}"


def looks_like(text: str) -> bool:
    """Whether a value of `model` is meant as a reference: no preset has such a name."""
    return not text.startswith("${") and (":" in text or os.sep in text or text.endswith(FILE))


def parse(text: str, folders: Sequence[str] = ("",)) -> Reference:
    """Return the reference that a text means, whether or not it exists.

    A relative path is below the first of the `folders` that has the file; "" is the working directory. Raises
    CannotRun for a text without a callable, and for a path that no key can hold.
    """
    place, _, name = text.rpartition(":")
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise CannotRun([_without_callable(text, folders)])
    path = _path(place, folders)
    if place.endswith(FILE) or os.path.isfile(path) or (os.sep in place and ":" not in place):
        if (wrong := _unusable(path)) or not path.endswith(FILE):
            message = wrong or f"is not a Python file, whose name ends in {FILE}"
            raise CannotRun([Problem("model", repr(text)[1:-1], message, hint=f"model=FILE{FILE}:{name}")])
        return Reference(path, name)
    folder, _, module = place.rpartition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        message = f"is neither a file, whose name ends in {FILE}, nor a module"
        raise CannotRun(
            [Problem("model", text, message, hint=f"model=FILE{FILE}:{name}, or model=PACKAGE.MODULE:{name}")]
        )
    folder = folder or next((one for one in map(os.path.abspath, folders) if _below(one, module)), "")
    if wrong := _unusable(folder):
        raise CannotRun([Problem("model", repr(text)[1:-1], wrong)])
    return Reference(module, name, folder)


def kept(text: str) -> str:
    """The text of a reference as it is kept; a text that is none as it is."""
    try:
        return parse(text).text if looks_like(text) else text
    except CannotRun:
        return text  # it is refused where the configuration is composed


def typed(overrides: Sequence[str]) -> list[str]:
    """The overrides with what `model=` names as an absolute, quoted value, which Hydra reads whatever is in the path.

    Several models, between commas, stay several: model='/home/me/a.py:build','/home/me/b c.py:build',unet.
    """
    return [f"{KEY}{_values(text.removeprefix(KEY))}" if text.startswith(KEY) else text for text in overrides]


def command(overrides: Sequence[str]) -> str:
    """The shell's command with these overrides, and with the user's folder of choices; the quotes of `typed` are left
    out where a path needs none."""
    folder = registry.further()
    return shlex.join(["python", "run.py", *(["--config-dir", folder] if folder else []), *map(_plain, overrides)])


def _plain(override: str) -> str:
    inner = _unquoted(override.removeprefix(KEY)) if override.startswith(KEY) else None
    return f"{KEY}{inner}" if inner and PLAIN.fullmatch(inner) else override


def find(reference: Reference) -> Path:
    """Return the file of a reference. Raises CannotRun where there is none."""
    if not reference.is_file:
        spec = _spec(reference.place, (reference.folder,) if reference.folder else ())
        if spec is None:
            message = f"is not found: there is no module {reference.place}, neither in {os.getcwd()} nor among Python's"
            raise CannotRun([Problem("model", reference.shown, message, _near_files(reference))])
        return Path(spec.origin or "")
    if not os.path.isfile(reference.place):
        what = "is a folder" if os.path.isdir(reference.place) else "does not exist"
        where = "" if reference.shown == reference.text else f" ({reference.place})"
        raise CannotRun([Problem("model", reference.shown, f"{what}{where}", _near_files(reference))])
    return Path(reference.place)


def _path(place: str, folders: Sequence[str]) -> str:
    paths = [os.path.abspath(os.path.join(folder, place)) for folder in folders]
    home = os.path.abspath(os.path.expanduser(place))
    return next(filter(os.path.isfile, [*paths, home]), paths[0])


def _unusable(path: str) -> str:
    """Why no configuration can hold a path; "" if it can."""
    if "${" in path:
        return "has ${ in its path, which stands for the value of another key"
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in path):
        return "has a control character in its path, or one that is not UTF-8"
    return ""


def _without_callable(text: str, folders: Sequence[str]) -> Problem:
    """A file, or a folder, without `:NAME`: the functions and classes of the file are suggested."""
    path = _path(text.rstrip(":"), folders)
    names = _defined(path) if text.rstrip(":").endswith(FILE) and os.path.isfile(path) else []
    fixes: tuple[Fix, ...] = tuple({"model": f"{text.rstrip(':')}:{name}"} for name in names[:3])
    hint = "" if fixes else f"model=FILE{FILE}:NAME"
    return Problem("model", text, "names no function or class that makes a model", fixes, hint)


def _defined(path: str) -> list[str]:
    """The public functions and classes at the top level of a file, by their lines; the likely ones first."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    names = re.findall(r"^(?:def|class) ([^\W_]\w*)", text, re.MULTILINE)
    return sorted(names, key=lambda name: name not in ("build", "model", "make_model"))


def _near_files(reference: Reference) -> tuple[Fix, ...]:
    """The same callable in a file of a similar name."""
    if not reference.is_file:
        return ()
    folder, name = os.path.split(reference.place)
    try:
        there = [one for one in os.listdir(folder) if one.endswith(FILE)]
    except OSError:
        return ()
    near = difflib.get_close_matches(name, there, n=1)
    return tuple({"model": Reference(os.path.join(folder, one), reference.name).shown} for one in near)


def _values(raw: str) -> str:
    """What stands after `model=`, for Hydra."""
    if not looks_like(raw):
        return raw
    if not _exists(raw):
        if (inner := _unquoted(raw)) is not None:
            return _quoted(kept(inner))
        if match := CHOICE.fullmatch(raw):
            return _values(match[1])
        if raw.startswith((*QUOTES, "[")):
            return raw  # Hydra reads it
    return ",".join(_quoted(kept(one)) for one in _several(raw))


def _quoted(text: str) -> str:
    """A value for Hydra; a reference in quotes, without which Hydra would escape its colon."""
    spelled_text = spelled(text)
    return f"'{text}'" if spelled_text == text and looks_like(text) else spelled_text


def _unquoted(raw: str) -> str | None:
    """The content of one quoted text, as Hydra reads it; None if it is none."""
    quote = raw[:1]
    match = re.fullmatch(rf"{quote}((?:[^{quote}\\]|\\.)*){quote}", raw, re.DOTALL) if quote in QUOTES else None
    if not quote or match is None:
        return None
    return re.sub(rf"(\\+)({quote}|$)", lambda found: found[1][: len(found[1]) // 2] + found[2], match[1])


def _several(raw: str) -> list[str]:
    """The models that are named between commas: one if a path has them, else each that exists or is a preset."""
    if "," not in raw:
        return [raw]
    if found := _cut(raw):
        return list(found)
    pieces = AFTER_NAME.sub(r"\1\0", raw).split("\0")
    return [name for piece in pieces for name in _presets_before(piece)]


@lru_cache(maxsize=256)
def _cut(raw: str) -> tuple[str, ...]:
    """Pieces of a text, each of which exists or is a word, the first as long as possible; none if there are no such."""
    for end in [len(raw), *(place for place in range(len(raw) - 1, 0, -1) if raw[place] == ",")]:
        if not (_exists(raw[:end]) or re.fullmatch(r"\w+", raw[:end])):
            continue
        if end == len(raw):
            return (raw,)
        if rest := _cut(raw[end + 1 :]):
            return (raw[:end], *rest)
    return ()


def _presets_before(piece: str) -> Iterator[str]:
    """unet,gpt,net.py:build -> unet, gpt and net.py:build."""
    while match := re.match(r"(\w+),", piece):
        yield match[1]
        piece = piece[match.end() :]
    yield piece


def _exists(text: str) -> bool:
    """Whether a text is a reference to a file, or to a module, that is there."""
    try:
        reference = parse(text)
        find(reference)
    except CannotRun:
        return False
    return True


def _below(folder: str, module: str) -> bool:
    return _spec(module, (folder,)) is not None


def _spec(module: str, folders: Sequence[str]) -> ModuleSpec | None:
    """The spec of a module, in these folders or wherever Python looks, without importing the packages above it."""
    path: list[str] | None = list(folders) or None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec if spec and spec.origin and spec.has_location else None


def _found(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if path is not None:
        return PathFinder.find_spec(name, path)
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return next((spec for find_spec in finders if find_spec and (spec := find_spec(name, None))), None)
