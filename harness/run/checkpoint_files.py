"""The files of a run's checkpoints: RUN_DIR/checkpoints/step-N.pt, after N steps, the last two kept.

    torch's zip file           data.pkl, data/0, ...: weights, the optimizer's state, generators
      + regatta/run.json       RunState: the run up to this step, and the checksums of the other members; all are in
                               the folder archive/, since torch reads no file with members elsewhere

So a checkpoint is enough to resume from, whatever happened to the files next to it. One in shards has a folder
step-N.shards, too, which is written first: without step-N.pt, which has the checksums of its files, it is none.
Importing this module does not import torch.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from harness.core.run_files import CHECKPOINTS
from harness.core.serialization import Document, SchemaError, parse

KEPT = 2
STATE = "archive/regatta/run.json"
STATE_BYTES = 1 << 30
"""More than any run's: a file that claims more is none of ours."""
_DIRECTORY_SUM = 8
"""Bytes of the checksum at the end of the file."""
_NAME = re.compile(r"step-(0|[1-9][0-9]*)(\.\w+)")
"""As `place` spells it: a file step-0099.pt is the user's."""
_WHOLE, _PART, _DAMAGED = ".pt", ".part", ".damaged"
_SHARDS, _DAMAGED_SHARDS = ".shards", ".damaged_shards"
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, struct.error),
    *(NotImplementedError, RuntimeError, ValueError, LookupError),
)
"""Exceptions of Python's zipfile and json for a file that is truncated, changed, or of another format."""


@dataclass(frozen=True)
class RunState(Document):
    """State of a run in a checkpoint: `lines` are those of metrics.jsonl, one for each of the `step` steps.

    `config`, `plan`, `id` and `manifest` are the record's. `members` are the checksums of torch's part of the file,
    `shards` those of the files in the folder of shards.
    """

    step: int
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    id: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    members: dict[str, int] = field(default_factory=dict)
    shards: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = [json.loads(line)["step"] for line in self.lines]
        if numbers != list(range(self.step)):
            raise ValueError(f"has the lines of {len(numbers)} steps, not of {self.step}")


class Unusable(Exception):
    """A checkpoint that no run resumes from; the message says why."""


def steps(run_dir: Path) -> list[int]:
    """Steps after which there is a checkpoint, the newest first."""
    return sorted((int(path.stem.removeprefix("step-")) for path in _ours(run_dir, _WHOLE)), reverse=True)


def _ours(run_dir: Path, *kinds: str) -> list[Path]:
    """The files of checkpoints with these endings; others in their folder are the user's."""
    found = ((path, _NAME.fullmatch(path.name)) for path in (run_dir / CHECKPOINTS).glob("step-*"))
    return [path for path, match in found if match and match[2] in kinds]


def after_steps(step: int) -> str:
    """Return the words "after 7 steps"."""
    return f"after {step} step{'s' * (step != 1)}"


def place(run_dir: Path, step: int) -> Path:
    """The file of the checkpoint after so many steps."""
    return run_dir / CHECKPOINTS / f"step-{step}{_WHOLE}"


def shards_of(run_dir: Path, step: int) -> Path:
    """The folder with the shards of the checkpoint after so many steps, if it has some."""
    return place(run_dir, step).with_suffix(_SHARDS)


def checksum(path: Path) -> int:
    """The checksum of a file, as `RunState.shards` has it."""
    found = 0
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            found = zlib.crc32(data, found)
    return found


def write(run_dir: Path, state: RunState, fill: Callable[[IO[bytes]], None]) -> None:
    """Have `fill` write torch's part of a checkpoint, and add the run's `state`: the file is whole or not there.

    Older checkpoints go, but for the one before. On any failure to write it (a full disk) no part of it stays, and the
    older ones do.
    """
    path = place(run_dir, state.step)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(_PART)
    try:
        with part.open("w+b") as file:
            with recording(file) as recorded:
                fill(recorded)
            _add(state, file)
            file.flush()
            os.fsync(file.fileno())
        older = [step for step in steps(run_dir) if step < state.step]
        for old in older[KEPT - 1 :]:  # before the new one is there: a writer that is killed leaves no third one
            place(run_dir, old).unlink(missing_ok=True)
            remove_folder(shards_of(run_dir, old))
        if state.shards:
            _sync(shards_of(run_dir, state.step))
        part.replace(path)
        _sync(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _Recording(io.RawIOBase):
    """A file that keeps the error of writing to it, which torch's writer replaces by one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def tell(self) -> int:
        return self.file.tell()

    def fileno(self) -> int:
        """For whoever syncs the file: all that was written is in it."""
        self.file.flush()
        return self.file.fileno()


@contextmanager
def recording(file: Any) -> Iterator[Any]:
    """Give the file to torch's writer within it: an error of writing is raised as the operating system's."""
    recorded = _Recording(file)
    try:
        yield recorded
    except RuntimeError as error:
        if recorded.error is None:
            raise
        raise recorded.error from error


def _add(state: RunState, file: IO[bytes]) -> None:
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        members = {member.filename: member.CRC for member in archive.infolist()}
        archive.writestr(STATE, json.dumps(replace(state, members=members).to_json()))
        archive.comment = b"0" * _DIRECTORY_SUM
    file.seek(-_DIRECTORY_SUM, os.SEEK_END)
    file.write(_directory_sum(archive, file))


def _directory_sum(archive: zipfile.ZipFile, file: IO[bytes]) -> bytes:
    """The checksum of the zip's directory, of which torch reads more than Python; it is the file's comment."""
    file.seek(archive.start_dir)
    directory = file.read()[:-_DIRECTORY_SUM]
    file.seek(-_DIRECTORY_SUM, os.SEEK_END)
    return f"{zlib.crc32(directory):0{_DIRECTORY_SUM}x}".encode()


def _sync(folder: Path) -> None:
    """Make the new name outlive a crash of the machine, too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system may not know this
            os.fsync(handle)
    finally:
        os.close(handle)


def read(run_dir: Path, step: int) -> RunState:
    """The run up to a checkpoint. Raises `Unusable` if it is not as a run has written it: by all checksums inside."""
    if not place(run_dir, step).is_file():  # opening a FIFO would wait for a writer
        raise Unusable("is no regular file")
    try:
        with place(run_dir, step).open("rb") as file, zipfile.ZipFile(file) as archive:
            state = _state(archive)
            if state.step != step:
                raise Unusable(f"is the one {after_steps(state.step)}, whose name is {place(run_dir, state.step).name}")
            if archive.comment != _directory_sum(archive, file):
                raise Unusable("is damaged in its directory")
            if damaged := archive.testzip():
                raise Unusable(f"is damaged in {damaged}")
            for name, found in state.shards.items():
                if checksum(shard := shards_of(run_dir, step) / name) != found:
                    raise Unusable(f"is damaged in {shard}")
            return state
    except _UNREADABLE as error:
        raise Unusable(f"cannot be read: {error}") from error


def _state(archive: zipfile.ZipFile) -> RunState:
    members = {member.filename: member for member in archive.infolist()}
    own = members.pop(STATE, None)
    if own is None or own.file_size > STATE_BYTES:
        raise Unusable("is no checkpoint of Regatta")
    try:
        state = RunState.from_json(parse(archive.read(own)))
    except SchemaError as error:
        raise Unusable(f"is not of this version of Regatta: {error}") from error
    if state.members != {name: member.CRC for name, member in members.items()}:
        raise Unusable("was changed after it was written")
    return state


def has_usable(run_dir: Path) -> bool:
    """Whether a run could resume from any of the checkpoints."""
    for step in steps(run_dir):
        with suppress(Unusable):
            read(run_dir, step)
            return True
    return False


def tidy(run_dir: Path, unusable: Sequence[int]) -> None:
    """Rename the checkpoints that cannot be used, and remove what a writer that was killed has left."""
    for step in unusable:
        path = place(run_dir, step)
        remove(path.with_suffix(_DAMAGED))
        path.replace(path.with_suffix(_DAMAGED))
        remove_folder(path.with_suffix(_DAMAGED_SHARDS))
        with suppress(FileNotFoundError):
            shards_of(run_dir, step).replace(path.with_suffix(_DAMAGED_SHARDS))
    for path in _ours(run_dir, _PART):
        remove(path)
    for path in _ours(run_dir, _SHARDS):
        if not path.with_suffix(_WHOLE).exists():
            remove_folder(path)


def remove_all(run_dir: Path) -> None:
    """Remove all checkpoints, and what writers that were killed have left; other files in their folder stay."""
    for path in _ours(run_dir, _WHOLE, _PART, _DAMAGED):
        remove(path)
    for path in _ours(run_dir, _SHARDS, _DAMAGED_SHARDS):
        remove_folder(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of shards with all that is in it, if it is there; a link to one stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def remove(path: Path) -> None:
    """Remove a file, or an empty folder by its name; one with something in it stays, and so does a link to one."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()
