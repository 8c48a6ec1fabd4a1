"""The entries of a race, as runs: `mode=race engine=single,gpipe,ddp model=gpt gpipe:engine.checkpoint=never`.

    engine=single,gpipe,ddp            an entry for each engine; engine=all: each engine that there is
    schemes=FILE.yaml                  those of a file, which have names
    NAME:key=value                     a key of one entry alone; every other key is all entries'

A file has the overrides of each entry:

    schemes:
      recomputing: [engine=gpipe, engine.checkpoint=always]
      replicas:    [engine=ddp]

The first entry is the one that the others are compared with. All have micro-batches of its size, unless a key says
otherwise, so that batch norm sees the same batches and no kernel is smaller. A sweep's file may have schemes, too, next
to its points: with `-m +sweeps=NAME` there is a race of them for each point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness.cli import choice_files
from harness.core.problem import LEAVE_OUT, CannotRun, Problem, bare_key, deduplicate, refuse
from harness.core.record import RunRecord
from harness.core.value_checks import one_of
from harness.launch import turns
from harness.races import verdict
from harness.sweep import engines, equal_micro_batches, points, run_point
from harness.sweep.points import Point
from harness.sweep.row import Row

RACE = "this race"
MOST_ROUNDS = 1000
OF_THE_RACE = ("mode", "schemes", "out", "steps", points.REPEATS)
"""Keys that mean the race, and no entry; those of the group `race` are in all entries, whose defaults they have."""
ENTRIES = "schemes=FILE.yaml, whose entries have names of their own"
SAME = ("batch.size", "model", "data", "precision", "seed", "optimizer")
"""Keys, and groups of keys, that all entries have in common: else their steps are not the same work."""


@dataclass
class Entry:
    """One scheme of a race: its name, its run, and the seconds of its measured step in each round."""

    name: str
    row: Row
    config: DictConfig | None = None
    """None for one that cannot run."""
    rounds_s: list[float] = field(default_factory=list)

    @property
    def overrides(self) -> tuple[str, ...]:
        return self.row.point.overrides

    @property
    def step_time_s(self) -> float:
        """The step time over its rounds, at least one, in seconds."""
        return verdict.step_time_s(self.rounds_s)


def races(overrides: Sequence[str], several: bool) -> dict[str, list[str]]:
    """The overrides of each race, by the name of its folder: "" where there is one alone.

    With `several` (-m) keys but the engine may have several values. Raises CannotRun where they do without.
    """
    own = [text for text in overrides if _key(text) in (*OF_THE_RACE, "engine") or _addressee(text)]
    others = [text for text in overrides if text not in own]
    file = points.of_races(others)
    if file and not {"schemes", "engine"} & {*map(_key, own)}:
        own = [f"schemes={file}", *own]
    found = points.expand(others, races=True)
    if len(found) == 1:
        return {"": [*found[0].overrides, *own]}
    if not several:
        keys = [key for key in found[0].values() if len({point.values().get(key) for point in found}) > 1]
        hint = "python run.py -m mode=race ... for a race of each"
        raise CannotRun([Problem(key, None, "has several values, a race has one", hint=hint) for key in keys], RACE)
    return {point.id: [*point.overrides, *own] for point in found}


def entered(overrides: Sequence[str]) -> list[Entry]:
    """All entries of a race, those too that are refused: these have their records already.

    Raises CannotRun for a race of fewer than two, one whose entries do different work, and what cannot be read.
    """
    schemes, shared = _schemes(overrides)
    if len(schemes) < 2:
        given = ",".join(schemes) or None
        raise CannotRun([Problem("engine", given, "is no race: it takes two", hint="engine=single,gpipe")], RACE)
    listed = {name: Point.of([*_last(shared, own)]) for name, own in schemes.items()}
    points.refuse_mistyped([*listed.values()], RACE)
    found = [_entry(name, point) for name, point in listed.items()]
    _refuse_other_work(found)
    found = _of_equal_micro_batches(found)
    _refuse_equals(found)
    refused = [one.row.record for one in found if one.row.record]
    if len(found) - len(refused) < 2:
        raise CannotRun(deduplicate([problem for record in refused for problem in record.problems]), RACE)
    return found


def rounds(overrides: Sequence[str]) -> int | None:
    """The number of rounds that `steps=` asks for; None: as many as it takes. Raises CannotRun for what is none."""
    given = value_of(overrides, "steps")
    if given is None:
        return None
    if not given.isdigit() or not 1 <= int(given) <= MOST_ROUNDS:
        message = f"is the number of rounds, from 1 to {MOST_ROUNDS}"
        raise CannotRun([Problem("steps", given, message, ({"steps": LEAVE_OUT},))], RACE)
    return int(given)


def repeated(overrides: Sequence[str]) -> dict[str, list[str]]:
    """The overrides of a race for each seed that `repeats=` asks for, by the name of its folder in that of the race.

    Without `repeats=` it is this race alone, and its name is "".
    """
    seeds = points.repeated([text for text in overrides if not _addressee(text)])
    if seeds is None:
        return {"": [*overrides]}
    others = [text for text in overrides if _key(text) not in (points.SEED, points.REPEATS)]
    return {f"{points.SEED}-{seed}": [*others, f"{points.SEED}={seed}"] for seed in seeds}


def value_of(overrides: Sequence[str], key: str) -> str | None:
    """The value of a key that belongs to the race; None where it is not given."""
    return points.value_of([text for text in overrides if not _addressee(text)], key)


def _schemes(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The overrides of each entry, and those of all."""
    addressed = [text for text in overrides if _addressee(text)]
    shared = [text for text in overrides if text not in addressed]
    file, names = points.value_of(shared, "schemes"), engines.listed(shared)
    if file is not None:
        if names:
            message = "is given next to schemes=, whose entries have engines of their own"
            raise CannotRun([Problem("engine", ",".join(names), message, ({"engine": LEAVE_OUT},))], RACE)
        schemes = _of_file(Path(file))
    else:
        refuse([problem for name in names for problem in one_of("engine", name, engines.known())], RACE)
        schemes = {name: [f"engine={name}"] for name in names}
    problems = []
    for text in addressed:
        name, own = _addressee(text), text.partition(":")[2]
        if name in schemes:
            schemes[name].append(own)
        else:
            problems.append(Problem(text, None, f"is for {name}, which is not one of {', '.join(schemes)}", hint=own))
        if bare_key(own) == "engine" and names:
            problems.append(Problem(text, None, "gives the entry another engine than its name says", hint=ENTRIES))
    problems += [
        Problem(f"{name}:{text}", None, "is a key of the whole race, not of one entry")
        for name, own in schemes.items()
        for text in own
        if bare_key(text) in OF_THE_RACE or bare_key(text).startswith("race.")
    ]
    refuse(problems, RACE)
    return schemes, [text for text in shared if _key(text) not in (*OF_THE_RACE, "engine")]


def _key(text: str) -> str:
    return text.partition("=")[0]


def _addressee(text: str) -> str:
    """The entry whose key this is; "" for a key of all."""
    name, colon, rest = text.partition(":")
    return name if colon and "=" not in name and "=" in rest else ""


def _of_file(path: Path) -> dict[str, list[str]]:
    if not path.is_file():
        raise CannotRun([Problem("schemes", str(path), "is not a file")], RACE)
    content: Any = choice_files.read(path)
    schemes = content.get("schemes") if isinstance(content, Mapping) else None
    right = isinstance(schemes, Mapping) and all(
        isinstance(own, list) and all(isinstance(text, str) for text in own) for own in schemes.values()
    )
    if not right or not schemes:
        message = "must hold schemes: {name: [overrides], ...}"
        raise CannotRun([Problem("schemes", str(path), message, hint="recomputing: [engine=gpipe]")], RACE)
    return {str(name): list(own) for name, own in schemes.items()}


def _last(shared: Sequence[str], own: Sequence[str]) -> list[str]:
    """The overrides of an entry, each key once: its own count, and before them the command line's."""
    keys = {_key(text): text for text in (*shared, *own)}
    if "engine" in keys:
        chosen = engines.keys_of(keys["engine"].partition("=")[2], [*keys.values()])
        keys |= {_key(text): text for text in chosen}
    return [
        "mode=run",
        *(text for key, text in keys.items() if key != "mode"),
        f"steps={turns.STEPS * MOST_ROUNDS}",
    ]


def _entry(name: str, point: Point) -> Entry:
    found = run_point.composed(point)
    row = Row(point)
    if isinstance(found, RunRecord):
        row.record = found
        return Entry(name, row)
    return Entry(name, row, found)


def _refuse_other_work(found: Sequence[Entry]) -> None:
    """Refuse entries whose steps are other work than the first one's."""
    able = [one for one in found if one.config is not None]
    problems = []
    for key in SAME:
        values = {one.name: _value(one.config, key) for one in able}
        first = next(iter(values.values()), None)
        if other := [name for name, value in values.items() if value != first]:
            given = [text for one in able for text in one.overrides if _key(text).startswith(key)]
            said = ", ".join(dict.fromkeys(text.removeprefix(f"{key}=") for text in given))
            message = f"differs between {able[0].name} and {', '.join(other)}: they would do different work"
            problems.append(Problem(key, said or None, message, hint=f"one {key} for all entries"))
    refuse(problems, RACE)


def _refuse_equals(found: Sequence[Entry]) -> None:
    """Refuse an entry that is another one with another name."""
    names: dict[str, str] = {}
    for one in found:
        first = names.setdefault(one.row.point.id, one.name)
        if first != one.name:
            raise CannotRun(
                [Problem("schemes", one.name, f"is the same run as {first}", hint="a key that differs")], RACE
            )


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


def _of_equal_micro_batches(found: list[Entry]) -> list[Entry]:
    """Give those without a number or a size of micro-batches micro-batches of the first one's size, where they can."""
    able = [one for one in found if one.config is not None]
    if not able:
        return found
    wanted = equal_micro_batches.samples(able[0].config)
    changed = {
        one.name: _with_size(one, wanted) for one in able[1:] if equal_micro_batches.samples(one.config) != wanted
    }
    return [changed.get(one.name, one) for one in found]


def _with_size(one: Entry, samples: int) -> Entry:
    """An entry with micro-batches of so many samples; as it is where that is given, or the batch does not allow it."""
    if any(_key(text) in equal_micro_batches.GIVEN for text in one.overrides):
        return one
    other = _entry(one.name, equal_micro_batches.of_size(one.row.point, samples))
    return one if other.row.record else other
