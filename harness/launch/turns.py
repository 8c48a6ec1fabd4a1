"""Turns of runs that train at the same time, one after the other: `harness.races` gives them, workers take them.

    race  --turn-->  worker of run 1   |== step ==|== step ==|
          <-seconds-                        the second is measured
          --turn-->  worker of run 2                             |== step ==|== step ==|
          <-seconds-
          --end--->  both                                                               their results

A worker finds the race by an environment variable, and says by it which run it is. It waits for its first turn once it
has warmed up. While it waits it changes its log's time, so that nobody takes it for one that hangs.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from harness.core.run_files import LOG, STOP
from harness.launch.fork_server import same_user

VARIABLE = "REGATTA_RACE"
"""Says the name of the race's socket, and after it which run of the race this is."""
Word = Literal["turn", "end", "stop"]
TURN, END = b"turn", b"end"
STEPS = 2
"""Steps of a turn, of which the last is measured."""
ALIVE_S = 1.0
"""Seconds between two signs that a worker waits."""
CONNECT_S = 10.0
MOST_BYTES = 1 << 16


class RaceLost(RuntimeError):
    """The race has ended without a word."""


class Turns:
    """The turns of one run, as its worker takes them."""

    def __init__(self, name: str, run: str, folder: Path) -> None:
        self.log, self.stop = folder / LOG, folder / STOP
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(CONNECT_S)
        try:
            self.socket.connect(f"\0{name}")
        except OSError as error:
            raise RaceLost("the race has ended, or is on another machine than rank 0") from error
        self.socket.settimeout(None)
        self._send({"run": run})

    @classmethod
    def of_environment(cls, folder: Path) -> Turns | None:
        """Those of the race that the run in `folder` is part of; None if there is none."""
        name, _, run = os.environ.get(VARIABLE, "").partition(" ")
        return cls(name, run, folder) if name else None

    def wait(self) -> Word:
        """Wait for a turn, the end of the race, or a request to stop the run (its file "stop").

        Raises RaceLost where the race has ended without a word.
        """
        while not select.select([self.socket], [], [], ALIVE_S)[0]:
            with suppress(OSError):
                os.utime(self.log)
            if self.stop.exists():
                return "stop"
        word = self.socket.recv(MOST_BYTES)
        if not word:
            raise RaceLost("the race has ended without a word")
        return "turn" if word == TURN else "end"

    def took(self, **figures: float) -> None:
        """Say what the turn has measured."""
        self._send(figures)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.socket.send(json.dumps(message).encode())
        except OSError as error:
            raise RaceLost("the race has ended without a word") from error


class Seat:
    """One run's end of the socket in the race."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def give(self) -> None:
        """Give the run a turn. One that is gone answers with nothing."""
        with suppress(OSError):
            self.connection.send(TURN)

    def end(self) -> None:
        """Have the run end as one that has done all of its steps."""
        with suppress(OSError):
            self.connection.send(END)

    def answer(self, patience_s: float) -> dict[str, float] | None:
        """What the turn has measured; None if nothing has come yet. Raises EOFError if the run is gone."""
        if not select.select([self.connection], [], [], patience_s)[0]:
            return None
        try:
            message = self.connection.recv(MOST_BYTES)
        except OSError as error:
            raise EOFError from error
        if not message:
            raise EOFError
        found: dict[str, float] = json.loads(message)
        return found


class TurnGiver:
    """The socket of a race, to which the workers of its runs come."""

    def __init__(self) -> None:
        self.name = f"regatta-race-{os.getpid()}-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{self.name}")  # a name that is no file's: nothing is left of it
        self.listener.listen()
        self.seats: dict[str, Seat] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.listener.close()
        for seat in self.seats.values():
            seat.connection.close()

    def environment(self, run: str) -> dict[str, str]:
        """The variable by which the processes of a run find this race."""
        return {VARIABLE: f"{self.name} {run}"}

    def came(self, patience_s: float) -> str | None:
        """The run whose worker has come within so many seconds, ready for its first turn; None if none has."""
        if not select.select([self.listener], [], [], patience_s)[0]:
            return None
        connection, _ = self.listener.accept()
        message = connection.recv(MOST_BYTES) if same_user(connection) else b""
        if not message:  # another user's, or a worker that has ended
            connection.close()
            return None
        run = str(json.loads(message)["run"])
        self.seats[run] = Seat(connection)
        return run
