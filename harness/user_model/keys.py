"""The keys `model.*` of a user's model: the parameters of its callable, and what a plain module is trained for.

def build(width: int = 64)     ->     model.width=64   and   model.task, model.input, model.classes, ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import MISSING

from harness.core.problem import Problem, spelled
from harness.core.value_checks import one_of
from harness.user_model import signature, sources
from harness.user_model.parameters import Parameter, Signature
from harness.user_model.reference import Reference, parse

HELP, HIDDEN = "help", "hidden"
"""Of a field's metadata: its text for --help, and whether it is left out there."""


SHARED: dict[str, tuple[Any, str]] = {
    "task": (
        str | None,
        "What a plain module is trained for: classification, text or regression; null: the callable returns a wrapper, "
        "as Classifier, or a whole model",
    ),
    "input": (list[int] | None, "Shape of one sample, for classification and regression: [3,32,32]"),
    "output": (list[int] | None, "Shape of one target, for regression: [1]"),
    "classes": (int | None, "Number of classes, for classification"),
    "vocabulary": (int | None, "Number of different tokens, for text"),
    "sequence": (int | None, "Tokens of a sample, for text"),
}
"""The keys that each user's model has, unless its callable has a parameter of that name."""
NEEDED: dict[str, dict[str, Any]] = {
    "classification": {"input": [3, 32, 32], "classes": 10},
    "text": {"vocabulary": 256, "sequence": 128},
    "regression": {"input": [8], "output": [1]},
}
"""The keys of each task, with an example."""


def identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the model: the code, wherever it is, the callable in it, and the keys. Raises CannotRun if a source
    cannot be read."""
    place = parse(settings["callable"])
    others = {key: value for key, value in settings.items() if key not in ("callable", "source")}
    return {**others, "name": place.name, "code": sources.code(place)}


def renamed(name: str, settings: Mapping[str, Any]) -> str:
    """The name of a model, as "net.py:build width=9", with the file where it is now."""
    place = parse(settings["callable"])
    _, found, given = name.partition(f":{place.name}")
    return f"{place.title}{given}" if found else name


def schema(place: Reference) -> type:
    """The dataclass of a reference's keys: `name`, `callable` and `source` (the digest of its sources), the callable's
    parameters, and those of `SHARED` that are not among these. Raises CannotRun as `signature.read`."""
    return _schema(place, sources.digest(place))


@lru_cache(maxsize=64)
def _schema(place: Reference, digest: str) -> type:
    found = signature.read(place)
    fixed = {"name": place.title, "callable": place.text, "source": digest}
    first = [(name, str, dataclasses.field(default=value, metadata={HIDDEN: True})) for name, value in fixed.items()]
    own = [(one.name, _hint(one), _field(one)) for one in found.keys]
    made = dataclasses.make_dataclass("UserModel", [*first, *own, *shared({one.name for one in found.keys})])
    made.__doc__ = found.meaning
    return made


def shared(without: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """The fields of `SHARED`, for `dataclasses.make_dataclass`."""
    return [
        (name, hint, dataclasses.field(default=None, metadata={HELP: text}))
        for name, (hint, text) in SHARED.items()
        if name not in without
    ]


def problems(settings: Mapping[str, Any]) -> list[Problem]:
    """Values that the callable's annotations do not allow, and keys of a task that it lacks or does not have."""
    found = signature.read(parse(settings["callable"]))
    own = [problem for one in found.keys for problem in _of_parameter(one, settings[one.name])]
    return own or _of_task(settings, found)


def missing(settings: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The keys that a task needs and that are not given, with an example of each."""
    return {f"model.{key}": value for key, value in NEEDED[task].items() if settings.get(key) is None}


def _hint(one: Parameter) -> Any:
    assert one.kind
    return one.kind.hint


def _field(one: Parameter) -> Any:
    """A field with the parameter's default, which is to be given if there is none."""
    choices = _choices(one)
    meta = {HELP: ": ".join(filter(None, [one.help.rstrip(".") if choices else one.help, choices]))}
    if one.required:
        return dataclasses.field(default=MISSING, metadata=meta)
    if isinstance(one.default, list):
        return dataclasses.field(default_factory=lambda: list(one.default), metadata=meta)
    return dataclasses.field(default=one.default, metadata=meta)


def _choices(one: Parameter) -> str:
    return " | ".join(map(spelled, one.kind.choices)) if one.kind else ""


def _of_parameter(one: Parameter, value: Any) -> list[Problem]:
    kind = one.kind
    if kind is None or value is None or kind.takes(value):
        return []
    key = f"model.{one.name}"
    wrong = [each for each in (value if kind.many else [value]) if kind.choices and each not in kind.choices]
    if wrong and not kind.many:
        return one_of(key, value, kind.choices)
    if wrong:
        return [Problem(key, value, f"holds {spelled(wrong[0])}, which is not one of {_choices(one)}")]
    if kind.length not in (None, len(value)):
        default = ({key: one.default},) if not one.required else ()
        return [Problem(key, value, f"has {len(value)} items, {one.annotation} has {kind.length}", default)]
    return []


def _of_task(settings: Mapping[str, Any], found: Signature) -> list[Problem]:
    """A parameter of the callable that is called `task` is its own matter."""
    own, task = {one.name for one in found.keys}, settings.get("task")
    if "task" in own:
        return []
    given = [key for key in SHARED if key not in own and settings.get(key) is not None]
    if task is None:
        return []
    if wrong := one_of("model.task", task, tuple(NEEDED)):
        return wrong
    numbers = {key: value for key in given if isinstance(value := settings[key], int | list)}
    bad = [key for key, value in numbers.items() if min(value if isinstance(value, list) else [value], default=1) < 1]
    problems = [Problem(f"model.{key}", numbers[key], "must be at least 1") for key in bad]
    others = [key for key in given if key not in NEEDED[task] and key != "task"]
    of = "".join(f", which has {' and '.join(f'model.{one}' for one in NEEDED[task])}")
    problems += [
        Problem(f"model.{key}", settings[key], f"is no key of model.task={task}{of}", ({f"model.{key}": "~"},))
        for key in others
    ]
    lacking = missing(settings, task)
    if lacking:
        hint = " ".join(f"{key}={spelled(value)}" for key, value in lacking.items())
        problems.append(Problem("model.task", task, f"needs {' and '.join(lacking)}", hint=hint))
    return problems
