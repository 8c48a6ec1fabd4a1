"""`python run.py mode=tune ...`: search, over one engine or several, then race the best on this machine.

    engine=a,b or all   a search for each, and one table       harness.sweep
    tune.verify=3       the best three train in turns          harness.races.race

What was chosen for a described cluster is raced with the same mesh on this machine, where that has the devices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.compose import compose
from harness.core import files
from harness.core.problem import CannotRun, Problem, bare_key
from harness.core.record import EXIT_CODES, RunRecord
from harness.planning.tune.result import NOT_OF_A_RUN, Best, of_a_run
from harness.run import runner
from harness.sweep import engines

if TYPE_CHECKING:  # the search of one engine, which verifies nothing, needs no sweeps and no races
    from harness.races.result import Result
    from harness.sweep.row import Row


def main(overrides: Sequence[str]) -> int:
    """Search, print what is found, and verify it if asked; returns the exit code of the search, or that of a race that
    was interrupted."""
    if engines.tunes_several(overrides):
        from harness.sweep import local

        folder, verify = local.folder_of(overrides), _verified([*local.rows_of(overrides)[0].point.overrides])
        rows = local.rows_of([text for text in overrides if bare_key(text) != "tune.verify"])
        code = local.run_to_end(rows, folder)
        records, lacking = [row.record for row in rows if row.record], [*_lacking(rows)]
    else:
        config = compose(overrides)
        verify, folder = config.tune.verify, Path(config.out or "runs/tuned")
        records, lacking = [runner.run(config, overrides)], []
        code = EXIT_CODES[records[0].status]
    best = _best(records, verify)
    if not verify or not best or code == EXIT_CODES["preempted"]:
        return code
    for line in lacking:
        _say(line)
    return verified(best, folder, overrides, _say) or code


def _lacking(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each engine whose search has found nothing to verify, with the reason."""
    from harness.sweep.points import value_of

    for row in rows:
        record = row.record
        if record is not None and not record.metrics.get("tuned"):
            reason = record.problems[0].statement if record.problems else record.reason.partition("\n")[0]
            yield f"not verified: {value_of(row.point.overrides, 'engine')} is {record.status}: {reason}"


def _say(line: str) -> None:
    from rich.text import Text

    from harness.sweep.table import console_of_sweep

    console_of_sweep().print(Text(line), soft_wrap=True)


def _verified(overrides: Sequence[str]) -> int:
    """`tune.verify` of a search over several engines. Raises CannotRun for what is no number of entries."""
    from harness.sweep.points import value_of

    given = value_of(overrides, "tune.verify")
    if given is None:
        return 0
    if not given.isdigit() or int(given) == 1:
        message = "is a number of entries of a race: 0 for none, or at least 2"
        raise CannotRun([Problem("tune.verify", given, message, ({"tune.verify": 3},))], "this search")
    return int(given)


def _best(records: Sequence[RunRecord], most: int) -> list[Best]:
    """The best of each kind of scheme, the fastest first; where there are too few kinds, the next best of any. Of kinds
    with the same figures, as planners that find the same plan, the first one."""
    tuned = [record.metrics["tuned"] for record in records if record.metrics.get("tuned")]
    kinds, others = ([Best(**one) for each in tuned for one in each[key]] for key in ("kinds", "rows"))
    chosen: dict[Best, Best] = {}
    for one in (*sorted(kinds, key=_order), *sorted(others, key=_order)):
        if len(chosen) < most:
            chosen.setdefault(replace(one.figures, scheme=""), one)
    return sorted(chosen.values(), key=_order)


def _order(one: Best) -> tuple[float, str]:
    return one.step_time_s, one.scheme


def verified(best: Sequence[Best], folder: Path, overrides: Sequence[str], say: Callable[[str], None]) -> int:
    """Race the choices that can run on this machine; says what cannot and why, and what the first choice lost. The
    last line is the command of the fastest one. Returns 0, or the exit code of a race that was interrupted."""
    from harness.sweep import run_point
    from harness.sweep.points import Point

    say(f"verifying the best {len(best)} on this machine")
    able = {}
    for number, one in enumerate(best, 1):
        point = Point.of(["mode=run", *of_a_run(one.overrides)])
        found = run_point.composed(point)
        if isinstance(found, RunRecord):
            reason = found.problems[0].statement if found.problems else found.reason
            say(f"{number} {one.scheme} cannot run here: {reason}")
        else:
            kept = [text for text in point.overrides if bare_key(text) not in (*NOT_OF_A_RUN, "steps")]
            able[f"{number} {one.scheme}"] = kept
    if len(able) < 2:
        say(f"nothing to race: {len(able)} of {len(best)} can run on this machine")
        return 0
    try:
        code, result = _raced(able, folder, overrides)
    except CannotRun as error:
        say(str(error))
        return 0
    for line in _lost(result, dict(enumerate(best, 1))):
        say(line)
    return code if code == EXIT_CODES["preempted"] else 0


def _raced(able: dict[str, list[str]], folder: Path, overrides: Sequence[str]) -> tuple[int, Result]:
    """The exit code and the result of a race of these entries, in a folder of its own next to that of the search."""
    from harness.races import race

    number, place = 1, Path(f"{folder}-verified")
    while place.exists():
        number, place = number + 1, Path(f"{folder}-verified-{number + 1}")
    place.parent.mkdir(parents=True, exist_ok=True)
    listed = Path(f"{place}.yaml")
    files.write_text(listed, json.dumps({"schemes": able}, indent=1))  # which is YAML, too
    shared = [text for text in overrides if text.startswith("race.")]
    (held,) = race.hold([*shared, f"schemes={listed}"], several=False, out=place)
    return held


def _lost(result: Result, best: dict[int, Best]) -> Iterator[str]:
    """What the first choice that could race lost to the fastest one."""
    if len(result.finished) < 2:
        yield "not verified: fewer than two have finished"
        return
    steps_s = {one.name: one.step_time_s for one in result.finished}
    first, fastest = min(steps_s, key=_number), min(steps_s, key=steps_s.__getitem__)
    if first == fastest:
        yield _fastest(result, first)
    else:
        over, faster = steps_s[first] / steps_s[fastest], result.ratios[fastest]
        noise = ", which may be noise" if faster.is_one else ""
        yield (
            f"the first choice, {first}, takes {over:.2f} times the step time of the fastest, {fastest}, measured on "
            f"this machine (its speed is {faster} times the first one's{noise})"
        )
    yield "the fastest on this machine; run it:"
    chosen = best[_number(fastest)]
    yield replace(chosen, overrides=tuple(of_a_run(chosen.overrides))).command


def _fastest(result: Result, first: str) -> str:
    """That the first choice is the fastest, or shares its rank with others."""
    equals = [
        name for name, place in result.places.items() if place.rank == result.places[first].rank and name != first
    ]
    if not equals:
        return (
            f"verified: the first choice, {first}, is the fastest of {len(result.finished)}, measured on this machine"
        )
    unresolved = any(not result.places[name].resolved for name in equals)
    why = (
        "not resolved, more rounds might part them   -> race.minutes=..."
        if unresolved
        else "the difference may be noise"
    )
    return f"the first choice, {first}, was the fastest on this machine, but {', '.join(equals)} may be as fast: {why}"


def _number(name: str) -> int:
    return int(name.partition(" ")[0])
