"""The YAML files of a user: choices in the folder of --config-dir, and sweeps. Read here before Hydra sees them.

Hydra raises errors of many kinds for a file that it cannot take; here each fault names the file and what is wrong.

    devices: 8                          refused: no schema
    defaults: [_cluster, _self_]        `_cluster` is the schema: it brings the keys, their types and defaults
    defaults: [gpt_12b, _self_]         another choice of the group, which has a schema
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import registry
from harness.config.schema import Config
from harness.core import files
from harness.core.problem import CannotRun, Problem
from harness.core.serialization import DEEPEST, MOST_DIGITS

CONF = registry.ROOT / "conf"
MOST_BYTES = 4 << 20
"""The largest YAML file that is read: parsing it takes half a minute."""
SETTLED_S = 2.0
"""A file that was written less than so many seconds ago may be written again without another time of change."""
PACKAGE = "# @package _global_"
"""The one line of Hydra's own that a choice may begin with."""
ENTRY = re.compile(r"([\w.-]+)(@\w+)?", re.ASCII)
"""An entry of `defaults`: a name, and where its keys go ("_given@planner")."""


def missing(group: str, name: str, folders: Sequence[Path]) -> set[str]:
    """The keys to which a choice says `???`, "to be given": Hydra takes the default for these. A file based on another
    one gives what that misses, and the reverse."""
    path = find(group, name, folders)
    if path is None:
        return set()
    content = read(path)
    found: set[str] = set()
    entries = content.pop("defaults", [])
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            keys = dict(_leaves(content, "" if any(_header(path)) else f"{group}."))
            found = {key for key in found if key not in keys} | {key for key, value in keys.items() if value == "???"}
        elif elsewhere := _override(entry):
            found |= missing(*elsewhere, folders)
        elif match := ENTRY.fullmatch(entry):
            found |= missing(group, match[1], folders)
    return found


def _leaves(content: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_choice(group: str, name: str, folders: Sequence[Path], above: tuple[Path, ...] = ()) -> None:
    """Raise CannotRun for a choice that Hydra cannot compose. The first of the `folders` that has GROUP/NAME.yaml
    counts; the files `above` bring this choice."""
    path = find(group, name, folders)
    if path is None:
        return
    found = _schemas(group, path, folders, above)
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise _fault(path, f"needs one schema among its defaults, it has {names}", _example_for(group, path))


def read(path: Path) -> dict[Any, Any]:
    """The keys of a YAML file, interpolations as they stand; what has not changed is not read again. Raises CannotRun
    with the file, and the line or the key."""
    try:
        state = os.stat(path)
    except OSError:
        return _read(path)
    if time.time() - state.st_mtime < SETTLED_S:
        return _read(path)
    return copy.deepcopy(_read_once(path, (state.st_mtime_ns, state.st_size, state.st_ino)))


@functools.lru_cache(maxsize=256)
def _read_once(path: Path, state: tuple[int, int, int]) -> dict[Any, Any]:
    return _read(path)


def _read(path: Path) -> dict[Any, Any]:
    try:
        text = files.read_bytes(path, MOST_BYTES).decode("utf-8")
        for event in _safe(yaml.parse(text)):
            if isinstance(event, yaml.ScalarEvent) and event.value.isdigit() and len(event.value) > MOST_DIGITS:
                raise _fault(_line(path, event), f"holds a number of {len(event.value)} digits")
        content = OmegaConf.load(io.StringIO(text))
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise _fault(path, f"is not UTF-8: {error.reason} at byte {error.start}") from error
    except _Unsafe as error:
        raise _fault(_line(path, error.event), str(error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise _fault(f"{path}, line {mark.line + 1}" if mark else path, f"cannot be read: {error.problem}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise _fault(path, f"cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise _fault(path, "must hold key: value, it holds a list")
    plain: Any = OmegaConf.to_container(content)
    return plain


def _schemas(group: str, path: Path, folders: Sequence[Path], above: tuple[Path, ...]) -> set[str]:
    """The schemas that a choice has among its defaults, and among the defaults of these."""
    content = read(path)
    _check_header(group, path, content)
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        raise _fault(path, f"has defaults that are no list: {defaults!r:.60}", _example_for(group, path))
    found: set[str] = set()
    chain = (*above, path)
    for entry in defaults:
        match = ENTRY.fullmatch(entry) if isinstance(entry, str) else None
        if elsewhere := _override(entry):
            _check_override(group, path, elsewhere, folders, chain)
            check_choice(*elsewhere, folders, chain)
            continue
        if not match:
            raise _fault(path, f"has {entry!r:.60} among its defaults, which is no name", _example_for(group, path))
        name = match[1]
        if name == "_self_":
            continue
        if (group, name[1:]) in registry.schemas() and name.startswith("_"):
            _check_place(group, path, entry, name)
            found.add(name)
            continue
        other = find(group, name, folders)
        if other is None or other in chain:
            why = "which is based on it" if other else f"which is no choice of {group}"
            raise _fault(path, f"has {name} among its defaults, {why}", _example_for(group, path))
        if not any(_header(other)):
            _check_place(group, path, entry, name)
        found |= _schemas(group, other, folders, chain)
    return found


def _check_header(group: str, path: Path, content: dict[Any, Any]) -> None:
    """The keys of a file are its group's own, or below `PACKAGE` those of a run: the advice follows from them."""
    of_run = {field.name for field in dataclasses.fields(Config)} | {"defaults"}
    others = [str(key) for key in content if key not in of_run]
    whole = not others and len(content.keys() - {"defaults"}) > 0
    for line in _header(path):
        if whole and line != PACKAGE:
            raise _fault(path, f"begins with {line}", f"{PACKAGE}, and {_placed(group)}")
        if not whole and (line != PACKAGE or others):
            why = f", and {others[0]} is no key of a run" if line == PACKAGE else ""
            raise _fault(path, f"begins with {line}{why}", f"no such line, and {example(group)}")


def _check_place(group: str, path: Path, entry: str, name: str) -> None:
    """Keys of schemas and other choices go to the file's group: below `PACKAGE` that must be said, else not."""
    right = f"{name}@{group}" if any(_header(path)) else name
    if entry != right:
        raise _fault(path, f"has {entry} among its defaults, its keys would go elsewhere", right)


def _check_override(
    group: str, path: Path, override: tuple[str, str], folders: Sequence[Path], chain: tuple[Path, ...]
) -> None:
    """Refuse what Hydra cannot override, or would for ever."""
    other, name = override
    order = [next(iter(entry)) for entry in read(CONF / "config.yaml")["defaults"] if isinstance(entry, dict)]
    earlier = order[: order.index(group)]
    target = find(other, name, folders)
    if not any(_header(path)):
        raise _fault(path, f"overrides {other}, and does not begin with {PACKAGE}", PACKAGE)
    if target in chain:
        raise _fault(path, f"overrides {other} with {name}, which is based on it")
    if other not in earlier:
        raise _fault(path, f"overrides {other}, a choice of {group} can override {' and '.join(earlier) or 'none'}")
    if target is None:
        raise _fault(path, f"overrides {other} with {name}, which is none of its choices")


def _override(entry: Any) -> tuple[str, str] | None:
    """The group and the choice of {"override /engine": "periodic"}: a choice may bring one of another group."""
    if not (isinstance(entry, dict) and len(entry) == 1):
        return None
    [(key, name)] = entry.items()
    group = str(key).removeprefix("override /")
    return (group, name) if group != key and group in registry.GROUPS and isinstance(name, str) else None


class _Unsafe(ValueError):
    """YAML syntax that is valid, but that no file of keys needs; `event` is its place."""

    def __init__(self, event: yaml.Event, message: str) -> None:
        super().__init__(message)
        self.event = event


def _safe(events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    """The events of a text, as long as it can be loaded: it does not nest too deep, nor refer to itself, and has plain
    values alone. Parsing to events is not recursive, and expands no aliases."""
    anchored = []
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            anchored.append(event.anchor is not None)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored.pop()
        if len(anchored) > DEEPEST:
            raise _Unsafe(event, f"is nested more than {DEEPEST} levels deep")
        if isinstance(event, yaml.AliasEvent) and any(anchored):
            raise _Unsafe(event, f"has the alias *{event.anchor} within an anchor")
        if getattr(event, "tag", None) not in (None, "!"):
            raise _Unsafe(event, f"has the tag {event.tag}, no value here needs one")
        yield event


def _header(path: Path) -> Iterator[str]:
    """The lines at the beginning that Hydra reads."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not re.match(r"\s*#+\s*@", line):
            return
        if line.strip():
            yield line.strip()


def find(group: str, name: str, folders: Sequence[Path]) -> Path | None:
    paths = (folder / group / f"{name}.yaml" for folder in folders)
    return next(filter(os.path.exists, paths), None)  # a name that is too long for a file is none


def example(group: str) -> str:
    """defaults: [_cluster, _self_]; of a group of plug-ins with their names."""
    names = sorted(name for owner, name in registry.schemas() if owner == group)
    return f"defaults: [_{names[0]}, _self_]" + (f", or of {', '.join(names[1:])}" if names[1:] else "")


def _placed(group: str) -> str:
    """The same below `PACKAGE`: defaults: [_cluster@cluster, _self_]."""
    return re.sub(r"\[(\w+),", rf"[\1@{group},", example(group))


def _example_for(group: str, path: Path) -> str:
    return _placed(group) if any(_header(path)) else example(group)


def _line(path: Path, event: yaml.Event) -> str:
    return f"{path}, line {event.start_mark.line + 1}"


def _fault(place: Path | str, message: str, hint: str = "") -> CannotRun:
    return CannotRun([Problem(str(place), None, message, hint=hint)])
