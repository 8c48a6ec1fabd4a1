"""The files of an earlier run in the same folder: put aside until it is known how the new run ends."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from harness import checkpoint_files
from harness.record import RunRecord
from harness.serial import SchemaError

ASIDE = ".earlier"


class Earlier:
    """`names` are a run's own files in `folder`; `record` is the one of them that makes the others a run.

    It is moved last and put back first, so that a process that is killed in between loses nothing.
    """

    def __init__(self, folder: Path, names: Sequence[str], record: str) -> None:
        self.folder, self.aside, self.record = folder, folder / ASIDE, record
        self.names = [record, *(name for name in names if name != record)]

    def put_aside(self) -> None:
        """Begin without the files of an earlier run, if there is one.

        What was put aside by a run that was killed is still the earlier one; that run's own files go.
        """
        if (self.aside / self.record).exists():
            self._remove()
        elif (self.folder / self.record).exists():
            self.aside.mkdir(exist_ok=True)
            _move(list(reversed(self.names)), self.folder, self.aside)

    def is_good(self) -> bool:
        """Whether a run is aside that ended well, or that can go on."""
        try:
            return RunRecord.load(self.aside / self.record).status == "ok" or bool(checkpoint_files.steps(self.aside))
        except (SchemaError, OSError):
            return False

    def has_trained(self) -> bool:
        """Whether that run is one of mode=run: what other modes leave is soon there again, its steps are not."""
        try:
            return self.is_good() and RunRecord.load(self.aside / self.record).config.get("mode") == "run"
        except (SchemaError, OSError):
            return False

    def put_back(self) -> None:
        """The earlier run in place of the new one."""
        self._remove()
        _move(self.names, self.aside, self.folder)
        self.drop()

    def drop(self) -> None:
        """Forget the earlier run."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def _remove(self) -> None:
        for name in self.names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _move(names: Sequence[str], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).exists():
            (source / name).replace(target / name)
