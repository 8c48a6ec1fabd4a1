"""Schedules as files: the actions of each rank, in the notation of torch.distributed.pipelining.

    0F0,0F1,,0B0,0B1          a row for each rank, an empty cell where it waits
    ,1F0,1B0,1F1,1B1          2F0 is the forward pass of micro-batch 0 on stage 2

| action             | what the rank does                                                                      |
|--------------------|-----------------------------------------------------------------------------------------|
| 2F0 2B0            | forward pass; backward pass                                                             |
| 2I0 2W0            | its two halves: the gradients of the inputs; those of the weights                       |
| 2R0                | recomputation, before its backward pass (torch does not have it)                        |
| (2F5;3B1)OVERLAP_F_B | a forward and a backward pass that torch gives to one function; here one after the other |
| 2SEND_F0 3RECV_F0  | the activations from stage 2 to stage 3; back, 3SEND_B0 and 2RECV_B0                    |
| 2UNSHARD 2RESHARD 2REDUCE_GRAD | of FSDP; read and written, nothing else                                     |

A `.json` file has the same actions: {"ranks": [["0F0", "0B0"], ["1F0", "1B0"]]}, null where a rank waits.
`harness.schedule.action_check` says what is wrong with the actions of a file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import cast

from harness.core import files, serialization
from harness.core.op import Kind, Op
from harness.core.problem import Problem, ProblemError
from harness.schedule import Schedule, collect_queues
from harness.schedule.transfers import Transfer, with_messages

PASSES = ("F", "I", "W", "B", "R")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
PAIR = "OVERLAP_F_B"
SUFFIXES = (".csv", ".json")
LARGEST = 100_000
"""Largest number of a stage or micro-batch; more is a slip of the pen."""
SHOWN = 8
"""The most problems of one kind that are listed."""
COUNTED = 1000
"""The most problems of one kind that are looked for."""
KEY = "engine.schedule"
_NOTATION = re.compile(rf"(\d+)({'|'.join((*SHARDING, *MESSAGES, *PASSES))})(\d*)")
_PAIR = re.compile(rf"\(([^()]*)\){PAIR}")


@dataclass(frozen=True, slots=True)
class Action:
    """`kind` of `micro_batch` on `stage`; those of FSDP (`SHARDING`) have no micro-batch."""

    stage: int
    kind: str
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def op(self) -> Op:
        """The task as a schedule has it: I is a B with a W."""
        return Op(self.stage, cast(Kind, "B" if self.kind == "I" else self.kind), self.micro_batch)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Passes that a rank may run at the same time."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))}){PAIR}"


Cell = Action | Overlapped | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an action stands: row and column of the file, from 1."""

    row: int
    column: int

    def __str__(self) -> str:
        return f"row {self.row}, column {self.column}"


@dataclass(frozen=True)
class Actions:
    """The cells of each rank, in order."""

    rows: tuple[tuple[Cell, ...], ...]

    def placed(self) -> Iterator[tuple[Action, Place]]:
        """Yield all actions, those of overlapped pairs one by one, with their places."""
        for row, cells in enumerate(self.rows, 1):
            for column, cell in enumerate(cells, 1):
                for action in parts(cell):
                    yield action, Place(row, column)

    def of_rank(self, rank: int) -> list[Action]:
        """Return the actions of a rank."""
        return [action for cell in self.rows[rank] for action in parts(cell)]

    @cached_property
    def micro_batches(self) -> int:
        return 1 + max((action.micro_batch or 0 for action, _ in self.placed()), default=-1)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, for actions that `harness.schedule.action_check` accepts."""
        found = {action.stage: place.row - 1 for action, place in self.placed() if action.kind in PASSES}
        return tuple(found[stage] for stage in sorted(found))

    @property
    def split(self) -> bool:
        """Whether a backward pass comes in halves."""
        return any(action.kind == "W" for action, _ in self.placed())

    def tasks(self) -> list[list[Op]]:
        """Return the passes of each rank as ops."""
        return [[one.op for one in self.of_rank(rank) if one.kind in PASSES] for rank in range(len(self.rows))]

    def only_passes(self) -> Actions:
        """Return these with empty cells in the place of messages and of what FSDP does: passes keep their places."""
        kept = (tuple(cell if _runs(cell) else None for cell in row) for row in self.rows)
        return Actions(tuple(kept))


class Unread(ProblemError):
    """Cells that are no action; `actions` are those of the others, with empty cells in the place of these."""

    def __init__(self, actions: Actions, problems: Sequence[Problem]) -> None:
        super().__init__(*problems)
        self.actions = actions


def parts(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of a cell."""
    if cell is None:
        return ()
    return cell.actions if isinstance(cell, Overlapped) else (cell,)


def _runs(cell: Cell) -> bool:
    return isinstance(cell, Overlapped) or (cell is not None and cell.kind in PASSES)


def is_file(name: str) -> bool:
    """Whether a value of `engine.schedule` names a file, not one of the engine's schedules."""
    return name.lower().endswith(SUFFIXES)


State = tuple[int, ...]
"""That of a file which has another content, or is another one of its name, is another."""


def read(path: str | Path) -> Actions:
    """Read a file of actions, once for each of its states. Raises ProblemError for one that is not there, is empty or
    has cells that are none."""
    return _read(str(path), state_of(path))


def state_of(path: str | Path) -> State:
    """Return the state of a file. Raises ProblemError for one that is not there."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@lru_cache(maxsize=4)
def _read(path: str, state: State) -> Actions:
    """Read a file that is in a `state`: a search asks for each of its candidates what is in it."""
    try:
        content = files.read_bytes(Path(path)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    return parse(content, path)


def _unreadable(path: str | Path, error: OSError | ValueError) -> ProblemError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ProblemError(Problem(KEY, str(path), f"cannot be read: {reason}", hint="a .csv or .json file"))


def parse(content: str, name: str) -> Actions:
    """Return the actions of a file's text; `name` says whether it is JSON. Raises ProblemError as `read`, Unread for
    cells that are no action."""
    table = _of_json(content, name) if name.lower().endswith(".json") else _of_csv(content, name)
    while table and not any(cell.strip() for cell in table[-1]):
        table.pop()
    if not table:
        example = '{"ranks": [["0F0", "0B0"]]}' if name.lower().endswith(".json") else "0F0,0F1,0B0,0B1"
        raise ProblemError(Problem(KEY, name, "has no actions", hint=f"a row for each rank: {example}"))
    problems: list[Problem] = []
    rows = []
    for row, texts in enumerate(table, 1):
        cells: list[Cell] = []
        for column, text in enumerate(texts, 1):
            try:
                cells.append(cell_of(text))
            except ValueError as error:
                hint = "a comma between two actions" if _several(text) else "an action such as 2F0, 2B0"
                problems.append(Problem(KEY, name, f"{Place(row, column)}: {error}", hint=hint))
                cells.append(None)
        rows.append(tuple(cells))
    actions = Actions(tuple(rows))
    if problems:
        raise Unread(actions, shortened(problems))
    return actions


def shortened(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first problems, the last of them with the number of those that are left out."""
    found = list(islice(problems, COUNTED))
    if len(found) <= SHOWN:
        return found
    least = "at least " * (len(found) == COUNTED)
    more = f"and {least}{len(found) - SHOWN + 1} more problems of this kind"
    return [*found[: SHOWN - 1], Problem(found[0].key, found[0].value, more, hint="correct the first ones")]


def _of_csv(content: str, name: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(content, newline=""))
    try:
        return list(reader)
    except csv.Error as error:
        message = f"line {reader.line_num} is no CSV: {error}"
        raise ProblemError(Problem(KEY, name, message, hint="a quotation mark that does not end?")) from None


def _of_json(content: str, name: str) -> list[list[str]]:
    form = 'is not {"ranks": [["0F0", ...], ...]}'
    try:
        value = serialization.parse(content)
    except serialization.SchemaError as error:
        raise ProblemError(Problem(KEY, name, str(error), hint='{"ranks": [["0F0", "0B0"]]}')) from None
    rows = value.get("ranks") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ProblemError(Problem(KEY, name, form, hint='{"ranks": [["0F0", "0B0"]]}'))
    if not all(cell is None or isinstance(cell, str) for row in rows for cell in row):
        raise ProblemError(Problem(KEY, name, f"{form}: a cell is neither a text nor null", hint='"0F0"'))
    return [["" if cell is None else cell for cell in row] for row in rows]


def cell_of(text: str) -> Cell:
    """Return what a cell says: "2F0", "(2F5;3B1)OVERLAP_F_B", or "". Raises ValueError for anything else."""
    text = text.strip()
    if not text:
        return None
    if found := _PAIR.fullmatch(text):
        actions = tuple(_action(one.strip()) for one in found[1].split(";"))
        if [one.kind for one in actions] not in (["F", "B"], ["F", "I"]):
            raise ValueError(f"{text[:60]!r} is no pair of a forward and a backward pass")
        return Overlapped(actions)
    return _action(text)


def _several(text: str) -> bool:
    """Whether a cell has actions with another character between them: a semicolon, a tab."""
    found = re.split(r"[;|\s]+", text.strip(" ;|\t"))
    return len(found) > 1 and all(_NOTATION.fullmatch(one) for one in found)


def _action(text: str) -> Action:
    found = _NOTATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no action")
    stage, kind, micro_batch = found.groups()
    if (kind in SHARDING) != (not micro_batch):
        raise ValueError(f"{text!r} {'has a' if micro_batch else 'names no'} micro-batch")
    if max(len(stage), len(micro_batch)) > len(str(LARGEST)) or max(int(stage), int(micro_batch or 0)) > LARGEST:
        raise ValueError(f"{text[:40]!r} has a number above {LARGEST:,}")
    return Action(int(stage), kind, int(micro_batch) if micro_batch else None)


def text(actions: Actions, name: str) -> str:
    """Return the text of a file; `name` says whether it is JSON. The CSV is, byte for byte, what torch writes."""
    rows = [["" if cell is None else str(cell) for cell in row] for row in actions.rows]
    if name.lower().endswith(".json"):
        lines = (json.dumps([cell or None for cell in row]) for row in rows)
        return '{"ranks": [\n  ' + ",\n  ".join(lines) + "\n]}\n"
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue()


def write(actions: Actions, path: str | Path) -> None:
    """Write a file of actions, CSV or JSON by its suffix."""
    files.write_bytes(Path(path), text(actions, str(path)).encode())


def from_schedule(schedule: Schedule) -> Actions:
    """Return the passes of each device of a schedule."""
    halved = {(op.stage, op.micro_batch) for queue in schedule.queues for op in queue.ops if op.kind == "W"}
    rows: list[tuple[Cell, ...]] = []
    for device in range(max(schedule.devices) + 1):
        ops = schedule.by_queue().get((device, "compute"), ())
        tasks = (op for op in ops if op.kind in ("F", "B", "W", "R"))
        kinds = ((op, "I" if op.kind == "B" and (op.stage, op.micro_batch) in halved else op.kind) for op in tasks)
        rows.append(tuple(Action(op.stage, kind, op.micro_batch) for op, kind in kinds))
    return Actions(tuple(rows))


def to_schedule(actions: Actions, transfers: Sequence[Transfer]) -> Schedule:
    """Return the schedule of these passes, with messages for `transfers` between its stages."""
    placed = actions.placement
    return Schedule(collect_queues(with_messages(actions.tasks(), placed, transfers)), placed)
