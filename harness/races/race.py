"""Run a race: start its entries one after the other, give them turns, and end them together.

    single   plan, warm up |.....|= =|......................|= =|            |end   record
    gpipe                  plan, warm up |.....|= =|.............|= =|       |end   record
    ddp                                  plan, warm up |= =|..........|= =|  |end   record
                           nobody measures a profile while another one trains

Each entry is a run in a folder of its own, as a point of a sweep is. One that is refused, fails, hangs or runs out
of memory is a row with its reason; the others go on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from harness.core.problem import CannotRun, Fix, Problem
from harness.core.record import EXIT_CODES
from harness.launch import fork_server, supervisor
from harness.launch.child_wait import LOOK_S
from harness.launch.signals import Preempted, preemptible
from harness.launch.turns import Seat, TurnGiver
from harness.races import entries, repeats, result
from harness.races.display import Display
from harness.races.entries import Entry
from harness.races.result import Result
from harness.races.verdict import is_decided
from harness.sweep import local, run_point


def main(overrides: Sequence[str], several: bool) -> int:
    """`python run.py mode=race engine=a,b ...`: race, print the closing table, leave race.json and race.png.

    With `several` (-m) other keys may have several values, and there is a race for each. Returns 0 if two entries
    at least have finished each race, else 1, and 130 if one was interrupted. Raises CannotRun for what cannot be a
    race, or a folder that cannot hold one.
    """
    return max(code for code, _ in hold(overrides, several))


def hold(
    overrides: Sequence[str], several: bool, out: Path | None = None, console: Console | None = None
) -> list[tuple[int, Result]]:
    """Race as `main` does; returns the exit code and the result of each race that has begun.

    The folder is `out` where the overrides name none; what is printed goes to the console, by default to stdout.
    """
    races = entries.races(overrides, several)
    rounds = {name: entries.rounds(own) for name, own in races.items()}
    with _folder(overrides, out) as folder:  # composing many entries takes a while
        entered = {
            name: {seed: entries.entered(one) for seed, one in entries.repeated(own).items()}
            for name, own in races.items()
        }
    held: list[tuple[int, Result]] = []
    for name, of_seeds in entered.items():
        own: list[Result] = []
        for seed, one in of_seeds.items():
            held.append(_hold(one, folder / name / seed, rounds[name], console))
            own.append(held[-1][1])
            if held[-1][0] == EXIT_CODES["preempted"]:
                break
        if len(of_seeds) > 1:
            with local.writing(folder):
                repeats.show(own, folder / name, console)
        if held[-1][0] == EXIT_CODES["preempted"]:
            break
    return held


def _hold(entered: Sequence[Entry], folder: Path, rounds: int | None, console: Console | None) -> tuple[int, Result]:
    """Hold one race."""
    interrupted, display = False, Display(entered, console)
    race = Race(entered, folder, rounds, display)
    with local.writing(folder):
        for one in entered:
            if one.row.record:
                run_point.refuse(one.row, folder / one.row.point.id, one.row.record)
        try:
            with preemptible(), fork_server.scope(), display:
                race.run()
        except KeyboardInterrupt:
            interrupted = True
        ended_s = time.monotonic()
        start_s = (race.rounds_began_s or ended_s) - race.began_s
        found = result.of(entered, folder, ended_s - race.began_s, start_s, interrupted)
        found.show(console)
        if race.errors:
            raise race.errors[0]
    if interrupted:
        return EXIT_CODES["preempted"], found
    return 0 if len(found.finished) > 1 else 1, found


@contextlib.contextmanager
def _folder(overrides: Sequence[str], out: Path | None) -> Iterator[Path]:
    """The race's folder, out=DIR, `out`, that of a sweep's file or runs/race-DATE, made; one that was not there is none
    again where the race is refused within the context. Raises CannotRun for one that holds a race already."""
    name = datetime.now().strftime("race-%Y-%m-%d_%H-%M-%S")
    own = local.folder_of(overrides) if entries.value_of(overrides, "+sweeps") else Path("runs") / name
    folder = Path(entries.value_of(overrides, "out") or out or own)
    if out:  # the caller may be in another working directory when it reads the records
        folder = folder.absolute()
    there = folder.exists()
    local.make(folder)
    if any(folder.iterdir()):
        fix: Fix = {"out": f"{folder}-2"}
        problem = Problem("out", str(folder), "holds something already, a race is always a new one", (fix,))
        raise CannotRun([problem], entries.RACE)
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):  # something is in it
            if not there:
                folder.rmdir()
        raise


class Race:
    """The entries that can run, each with the thread that follows its processes."""

    def __init__(self, entered: Sequence[Entry], folder: Path, rounds: int | None, display: Display) -> None:
        self.racing = [one for one in entered if one.config is not None]
        self.folder, self.rounds, self.display = folder, rounds, display
        self.threads: dict[str, threading.Thread] = {}
        self.stopped: set[str] = set()
        self.ended_by: int = signal.SIGTERM
        self.errors: list[Exception] = []
        self.began_s = time.monotonic()
        self.rounds_began_s: float | None = None

    def run(self) -> None:
        """All of it. A Ctrl-C ends the entries as the end of the race does, if each has had a turn."""
        if self.racing:
            supervisor.start_fork_server()
        with TurnGiver() as giver:
            try:
                for one in self.racing:
                    self._start(one, giver)
                self._go_round(giver)
            except KeyboardInterrupt as error:
                self._interrupted(error)
                raise
            finally:
                self._end(giver)

    def _start(self, one: Entry, giver: TurnGiver) -> None:
        """Start an entry, and wait until it has warmed up, or has ended, as it does where it makes no progress."""
        self.display.starts(one, self.folder / one.row.point.id / run_point.CONSOLE)
        follow = threading.Thread(target=self._follow, args=(one, giver), name=f"entry {one.name}", daemon=True)
        self.threads[one.name] = follow
        follow.start()
        while follow.is_alive() and one.name not in giver.seats:
            giver.came(LOOK_S)
            self.display.refresh()
        self.display.started(one, one.name in giver.seats)

    def _follow(self, one: Entry, giver: TurnGiver) -> None:
        """The thread of an entry: its processes, to their end; its row then has its record, or says why not."""

        def stop_if_asked() -> None:
            if one.name in self.stopped:
                raise Preempted("ended with its race", self.ended_by)

        place, environment = self.folder / one.row.point.id, giver.environment(one.name)
        try:
            run_point.run_point(one.row, place, one.config, stop_if_asked, environment=environment, among="race")
        except KeyboardInterrupt:
            pass
        except Exception as error:
            one.row.began_s, one.row.waits = None, f"failed: {error}"
            self.errors.append(error)

    def _go_round(self, giver: TurnGiver) -> None:
        """Round after round, at least one, until it is decided, or the minutes since the first one began are over."""
        if not self.racing or self.racing[0].config is None:
            return
        limit_s = 60.0 * self.racing[0].config.race.minutes
        number, began_s = 0, time.monotonic()
        self.rounds_began_s = began_s
        while (alive := self._alive(giver)) and number < (self.rounds or entries.MOST_ROUNDS):
            late = number > 0 and time.monotonic() - began_s > limit_s
            if not self.rounds and (late or self._is_decided(alive)):
                break
            try:
                for one in alive:
                    self._turn(one, giver.seats[one.name])
            except KeyboardInterrupt:
                for one in alive:
                    del one.rounds_s[number:]  # a round that not all have ended is none
                raise
            number += 1
            self.display.round_ended(number, [one.name for one in self._alive(giver)])

    def _alive(self, giver: TurnGiver) -> list[Entry]:
        return [one for one in self.racing if one.name in giver.seats and self.threads[one.name].is_alive()]

    @staticmethod
    def _is_decided(alive: Sequence[Entry]) -> bool:
        """Whether no more rounds are needed; of many rounds not asked after each, for the intervals take time."""
        number = len(alive[0].rounds_s)
        due = number % (1 + number // 20) == 0
        return len(alive) < 2 or (due and is_decided({one.name: one.rounds_s for one in alive}))

    def _turn(self, one: Entry, seat: Seat) -> None:
        """An entry's turn, to its end; one that fails in it has no further ones."""
        seat.give()
        with contextlib.suppress(EOFError):
            while self.threads[one.name].is_alive():
                if (figures := seat.answer(LOOK_S)) is not None:
                    one.rounds_s.append(figures["step_time_s"])
                    self.display.refresh()  # not in turns: these are measured
                    return
        self.threads[one.name].join()  # its record says why
        self.display.failed(one)

    def _end(self, giver: TurnGiver) -> None:
        """Have all end, and wait for their records. Those that have had no turn are stopped; all, by a Ctrl-C here."""
        for one in self._alive(giver):
            if one.rounds_s:
                giver.seats[one.name].end()
        self.stopped |= {one.name for one in self.racing if not one.rounds_s}
        try:
            self._wait()
        except KeyboardInterrupt as error:
            self._interrupted(error)
            self.stopped |= {*self.threads}
            self._wait()
            raise

    def _interrupted(self, error: KeyboardInterrupt) -> None:
        """The records of the entries that are stopped name the signal."""
        self.ended_by = error.number if isinstance(error, Preempted) else signal.SIGINT

    def _wait(self) -> None:
        while any(thread.is_alive() for thread in self.threads.values()):
            self.display.refresh()
            time.sleep(LOOK_S)
