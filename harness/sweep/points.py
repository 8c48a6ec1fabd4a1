"""Expand the overrides of a sweep to its points: a list of overrides and an id for each. Runs nothing."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep, ValueType
from hydra.errors import HydraException

from harness.cli import choice_files
from harness.cli.compose import choices, mistyped, session
from harness.config import registry
from harness.config.overrides import first_line, read
from harness.core.problem import LEAVE_OUT, CannotRun, Problem, bare_key, refuse
from harness.core.value_checks import one_of, similar
from harness.sweep import engines
from harness.user_model import reference

ID_LENGTH = 10
SWEEP = "this sweep"
WHOLE = ("+sweeps", "scale", "out", "repeats")
"""The keys that belong to the whole sweep."""
MOST_POINTS = 100_000
SEED, REPEATS = "seed", "repeats"
MOST_REPEATS = 1000
Table = dict[str, list[str]]
"""Key -> the overrides that it takes in turn: {"batch.size": ["batch.size=1", "batch.size=2"]}."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep: `overrides` in normal form, one for each key; `id` depends on nothing else."""

    id: str
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, overrides: Sequence[str]) -> Point:
        text = "\n".join(sorted(overrides))
        return cls(hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH], tuple(overrides))

    def values(self) -> dict[str, str]:
        """{"engine": "gpipe", ...}"""
        return {key: value for key, _, value in (override.partition("=") for override in self.overrides)}


def expand(overrides: Sequence[str], races: bool = False) -> list[Point]:
    """Every point, in order, each once. Of the same key in several places the later one counts:

        a point of the file   <   the file's grid   <   the command line

    `engine=all` stands for each engine, and `repeats=3` for three seeds: seed=0,1,2, or from the seed that is given on.
    `+sweeps=NAME` takes the points of sweeps/NAME.yaml, `scale=` one of its
    scales; commas, choice(), range() and glob() mean what they mean to Hydra, in the file too. `out=` is the sweep's
    and no part of a point. Raises CannotRun for what cannot be read, and for a file whose points are `races`.
    """
    if seeds := repeated(overrides):
        others = [text for text in overrides if bare_key(text) not in (SEED, REPEATS)]
        return expand([*others, f"{SEED}={','.join(map(str, seeds))}"], races)
    if len(single := engines.each(overrides)) > 1:
        return [point for one in single for point in expand(one, races)]
    if not races and (file := of_races(overrides)):
        others = [text for text in overrides if bare_key(text) != "mode"]
        hint = reference.command(["-m", *others])
        raise CannotRun([Problem("+sweeps", file.stem, "has schemes: its points are races", hint=hint)], SWEEP)
    with session() as loader:
        parser = OverridesParser.create(loader)
        own = {key: values for key, values in _table(overrides, parser, "").items() if key not in WHOLE}
        points, grid = _file(overrides, parser)
        tables = [point | grid | own for point in points]
    several = {key: None for table in tables for key, values in table.items() if len(values) > 1}
    count = sum(math.prod(map(len, table.values())) for table in tables)
    refuse(_too_many(", ".join(several), count), SWEEP)
    lists = itertools.chain.from_iterable(itertools.product(*table.values()) for table in tables)
    return list({point.id: point for point in map(Point.of, lists)}.values())


def repeated(overrides: Sequence[str]) -> range | None:
    """The seeds that `repeats=` asks for; None without it. Raises CannotRun for what is no number of repeats."""
    count = value_of(overrides, REPEATS)
    if count is None:
        return None
    first = value_of(overrides, SEED) or "0"
    if not first.isdecimal():
        raise CannotRun([Problem(SEED, first, f"must be a whole number, the first seed of {REPEATS}=")], SWEEP)
    if not count.isdecimal() or not 1 <= int(count) <= MOST_REPEATS:
        message = f"is the number of seeds, from 1 to {MOST_REPEATS}"
        raise CannotRun([Problem(REPEATS, count, message, ({REPEATS: LEAVE_OUT},))], SWEEP)
    return range(int(first), int(first) + int(count))


def refuse_mistyped(points: Sequence[Point], what: str = SWEEP) -> None:
    """Raises CannotRun with the problems of typing that every point has, and so `what` they are of; and with choices
    that do not exist, whoever has them: one of several engines that is misspelt would be a row at the sweep's end."""
    wrong = _no_choices(points)
    known, same = {one.statement for one in wrong}, {(one.key, one.message) for one in wrong}
    common = [one for one in _common(points) if one.statement in known or (one.key, one.message) not in same]
    refuse([*common, *(one for one in wrong if one.statement not in {other.statement for other in common})], what)


def _common(points: Sequence[Point]) -> list[Problem]:
    """The problems of typing that every point has."""
    common: list[Problem] = mistyped(points[0].overrides) if points else []
    for point in points[1:]:
        if not common:
            break
        here = {(problem.key, problem.message): problem for problem in mistyped(point.overrides)}
        known = [(problem, here.get((problem.key, problem.message))) for problem in common]
        common = [problem if problem == other else _of_all(problem) for problem, other in known if other]
    return common


def _no_choices(points: Sequence[Point]) -> list[Problem]:
    """A problem for each choice of a group, as `engine=dpp`, that is none."""
    typed = (text for point in points for text in point.overrides)
    given = dict.fromkeys(text for text in typed if text.partition("=")[0] in registry.GROUPS)
    with session() as loader:
        doubtful = [text for text in given if not _is_choice(text, loader)]
    return [one for text in doubtful for one in mistyped([text]) if one.key == text.partition("=")[0]]


def _is_choice(text: str, loader: ConfigLoader) -> bool:
    """Whether an override has a choice of its group, or what only a run can judge: a file of the user's, `${...}`."""
    group, _, typed = text.partition("=")
    name = typed[1:-1] if typed[:1] in ("'", '"') else typed
    return name in choices(loader, group) or "${" in name or (group == "model" and reference.looks_like(name))


def refuse_one_file(points: Sequence[Point]) -> None:
    """Raises CannotRun where several points would write the same file."""
    places = [place for point in points if (place := point.values().get("export"))]
    for place in {one for one in places if places.count(one) > 1}:
        message = f"is one file for {places.count(place)} points, each has a plan of its own"
        raise CannotRun([Problem("export", place, message, ({"export": LEAVE_OUT},))], SWEEP)


def _of_all(problem: Problem) -> Problem:
    """A problem that every point has with another value: its fix names the key alone."""
    known = [key for fix in problem.fixes[:1] for key, value in fix.items() if value != LEAVE_OUT]
    return replace(problem, value=None, fixes=(), hint=" ".join(f"{key}=..." for key in known) or problem.hint)


def value_of(overrides: Sequence[str], key: str) -> str | None:
    """The value of a key that belongs to the whole sweep, such as `+sweeps` or `out`; None where it is not given.

    Raises CannotRun for one that cannot be read, or gives several values.
    """
    given = [text for text in overrides if text.partition("=")[0] == key]
    if not given:
        return None
    try:
        found = _read(given[-1])
    except (HydraException, ValueError) as error:
        raise CannotRun([Problem(given[-1], None, f"cannot be read: {first_line(error)}")], SWEEP) from error
    if found.is_sweep_override():
        values = given[-1].partition("=")[2]
        raise CannotRun([Problem(key, values, "gives several values, a sweep takes one")], SWEEP)
    return str(found.value())


def scale_of(overrides: Sequence[str]) -> str | None:
    """The scale of the sweep's file that counts: the first one, if `scale=` is not given; None if there are none."""
    with session() as loader:
        return _scaled(overrides, OverridesParser.create(loader))[0]


def of_races(overrides: Sequence[str]) -> Path | None:
    """The sweep's file, if it has `schemes`: then each of its points is a race of these (`harness.races`)."""
    stem = value_of(overrides, "+sweeps")
    if stem is None:
        return None
    with session() as loader:
        path, content = _content(stem, OverridesParser.create(loader))
    return path if "schemes" in content else None


def _scaled(overrides: Sequence[str], parser: OverridesParser) -> tuple[str | None, str, dict[Any, Any]]:
    """The scale, where it stands in its file (for messages), and its `points` and `grid`."""
    scale, (path, content) = value_of(overrides, "scale"), _content(value_of(overrides, "+sweeps"), parser)
    where = str(path.relative_to(registry.ROOT) if path.is_relative_to(registry.ROOT) else path) if path.name else ""
    content = {key: value for key, value in content.items() if key != "schemes"}
    if set(content) != {"scales"}:
        if scale is not None:
            message = f"is given, {where or 'a sweep without a file'} has no scales"
            raise CannotRun([Problem("scale", scale, message, ({"scale": LEAVE_OUT},))], SWEEP)
        return None, where, content
    scales = content["scales"]
    right = isinstance(scales, dict) and bool(scales) and all(isinstance(one, dict) for one in scales.values())
    _expect(right, f"{where} scales", "name: {points: ..., grid: ...}", scales)
    chosen = next(iter(scales)) if scale is None else scale
    refuse(one_of("scale", chosen, list(scales)), SWEEP)
    return chosen, f"{where} scales.{chosen}", scales[chosen]


def _content(stem: str | None, parser: OverridesParser) -> tuple[Path, dict[Any, Any]]:
    """Return the place and the content of sweeps/STEM.yaml; empty ones without a file."""
    if stem is None:
        return Path(), {}
    known = choices(parser.config_loader, "sweeps") if parser.config_loader else []
    if stem not in known:
        message = f"is not one of {', '.join(known)}"
        near = similar(stem, known)
        fixes = ({"+sweeps": near},) if near else ()
        raise CannotRun([Problem("+sweeps", stem, message, fixes)], SWEEP)
    where = Path("sweeps", f"{stem}.yaml")
    folders = [registry.ROOT, *map(Path, filter(None, [registry.further()]))]
    path = next(path for folder in folders if (path := folder / where).exists())
    return path, choice_files.read(path)


def _file(overrides: Sequence[str], parser: OverridesParser) -> tuple[list[Table], Table]:
    """`points` and `grid` of the file at its scale; without a file one point that overrides nothing."""
    _, where, content = _scaled(overrides, parser)
    _expect(set(content) <= {"points", "grid"}, where, "points: and grid:, or scales:", content)
    points, grid = content.get("points", [[]]), content.get("grid", {})
    _expect(isinstance(points, list) and bool(points), f"{where} points", "a list of lists of overrides", points)
    _expect(isinstance(grid, dict), f"{where} grid", "key: [values]", grid)
    for number, point in enumerate(points):
        right = isinstance(point, list) and all(isinstance(item, str) for item in point)
        _expect(right, f"{where} points[{number}]", "a list such as [engine=gpipe, batch.size=16]", point)
    tables = [_table(point, parser, f"{where} points[{number}] ") for number, point in enumerate(points)]
    product = [text for key, values in grid.items() for text in _spelled(key, values, where)]
    return tables, _table(product, parser, f"{where} grid ", several=True)


def _spelled(key: str, values: Any, where: str) -> list[str]:
    """The overrides of one line of a grid: `key: 1,2`, `key: range(4)`, `key: [1, 2]` or `key: 1`."""
    _expect(values != [], f"{where} grid {key}", "at least one value", values)
    return [f"{key}={_typed(value)}" for value in (values if isinstance(values, list) else [values])]


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(texts: Sequence[str], parser: OverridesParser, where: str, several: bool = False) -> Table:
    """Parse overrides; a key that comes again replaces what was there, or adds to it where `several`."""
    table: Table = {}
    problems = []
    for text in reference.typed(texts):
        try:
            override = _read(text, parser)
            if found := _too_many(f"{where}{text}", _count(override)):
                problems += found
                continue
            key, values = override.get_key_element(), _values(override)
        except (HydraException, ValueError) as error:
            problems.append(Problem(f"{where}{text}", None, f"cannot be read: {first_line(error)}"))
            continue
        if where and key in WHOLE:
            hint = f"python run.py -m {text} ..."
            problems.append(Problem(f"{where}{text}", None, "belongs to the whole sweep", hint=hint))
        if not values:
            problems.append(Problem(f"{where}{text}", None, "gives no value, so there is no point", hint=f"{key}=..."))
        new = [f"{key}={value}" if value is not None else key for value in values]
        table[key] = [*(table.get(key, []) if several else []), *new]
    refuse(problems, SWEEP)
    return table


def _read(text: str, parser: OverridesParser | None = None) -> Override:
    override = read(text, parser or OverridesParser.create())
    override.config_loader = parser.config_loader if parser else None
    return override


def _too_many(key: str, count: float) -> list[Problem]:
    """A problem of a sweep that nobody could wait for, found before its points fill the memory."""
    if count <= MOST_POINTS:
        return []
    return [Problem(key, None, f"gives {count:.3g} points, at most {MOST_POINTS} are possible")]


def _count(override: Override) -> float:
    """How many values a range() gives; 1 for all else, which gives no more than was typed."""
    values = override.value()
    if not isinstance(values, RangeSweep) or not values.step:
        return 1
    return max((float(values.stop or 0) - float(values.start or 0)) / float(values.step), 0.0)


def _values(override: Override) -> list[str | None]:
    """The values of one override, spelled in one way only; [None] for ~key, which has none."""
    if override.is_delete():
        return [None]
    if not override.is_sweep_override():
        value = override.value()
        if isinstance(value, str) and value.startswith("${"):
            return [value]  # as it was typed: Hydra would escape it
        return [_lower(override.get_value_element_as_str())]
    texts = [_lower(text) for text in override.sweep_string_iterator()]
    schemas = override.value_type is ValueType.GLOB_CHOICE_SWEEP
    return [text for text in texts if not (schemas and text.startswith("_"))]


def _lower(text: str) -> str:
    """Hydra spells true as Python does."""
    return {"True": "true", "False": "false"}.get(text, text)


def _expect(condition: bool, key: str, wanted: str, got: Any) -> None:
    if not condition:
        raise CannotRun([Problem(key, None, f"must hold {wanted}, holds {str(got)[:60]}")], SWEEP)
