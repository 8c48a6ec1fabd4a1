"""Models of the user's own among the choices of `model`: named on the command line, or by a preset's `callable`.

model=net.py:build                    the callable itself
model=small                           DIR/model/small.yaml of --config-dir:   callable: net.py:build
                                                                              width: 16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli import choice_files
from harness.config.key_names import closest_key
from harness.config.overrides import described
from harness.core.problem import CannotRun, Problem
from harness.user_model import keys, reference
from harness.user_model.reference import Reference

CALLABLE = "callable"


@dataclass(frozen=True)
class Chosen:
    """What a choice names, and the keys that its preset at `path` gives."""

    place: Reference
    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None


def is_named(override: Override) -> bool:
    """Whether a choice is a reference to a callable, which no list of choices has."""
    value = override.value() if override.key_or_group == "model" else None
    return isinstance(value, str) and reference.looks_like(value)


def chosen(name: str, folders: Sequence[Path]) -> Chosen | None:
    """The user's model that a choice of `model` is; None for any other one. A preset is in one of the `folders`.

    A relative path in a preset is one from the preset's folder, from the folder of all choices or from the working
    directory. Raises CannotRun for a preset that is none, and for a reference that names no callable.
    """
    if reference.looks_like(name):
        return Chosen(reference.parse(name))
    path = choice_files.find("model", name, folders)
    content = choice_files.read(path) if path else {}
    if path is None or CALLABLE not in content:
        return None
    text = content.pop(CALLABLE)
    if not isinstance(text, str) or not reference.looks_like(text):
        raise _fault(path, f"has callable: {text!r:.80}, which names none", f"{CALLABLE}: net.py:build")
    if wrong := [key for key in content if key in ("defaults", "name", "source")]:
        raise _fault(path, f"has {wrong[0]} next to callable", f"{CALLABLE} and its keys alone")
    places = [str(path.parent), str(path.parent.parent), ""]
    return Chosen(reference.parse(text, places), content, path)


def node(one: Chosen) -> DictConfig:
    """The part `model` of the configuration, with the preset's values. Raises CannotRun for a callable that cannot be
    used, and for keys and values of the preset that it does not have."""
    schema = keys.schema(one.place)
    config = OmegaConf.structured(schema)
    known = [str(name) for name in config]
    for key, value in one.values.items():
        assert one.path
        if key not in known:
            near = closest_key(str(key), known)
            raise _fault(one.path, f"has {key}, which is no key of {one.place.shown}", near and f"{near}: ...")
        try:
            config[key] = MISSING if value == "???" else value
        except OmegaConfBaseException as error:
            wanted = described(schema.__annotations__[key])
            raise _fault(one.path, f"has {key}: {value!r:.60}, which is not {wanted}") from error
    return config


def _fault(path: Path, message: str, hint: str = "") -> CannotRun:
    return CannotRun([Problem(str(path), None, message, hint=hint)])
