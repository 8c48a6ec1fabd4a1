"""The record of one run, in memory and in the run's folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import own_files
from harness.failure import Failure
from harness.record import RunRecord, Status
from harness.run_files import RECORD, TRACE
from harness.serial import finite


class RecordFile:
    """`record` is what record.json says, from the first `update` on."""

    def __init__(self, folder: Path, record: RunRecord) -> None:
        self.path, self.record = folder / RECORD, record

    def update(self, **changes: Any) -> None:
        """Change the record, here and on disk; numbers that are not finite become null."""
        self.record = replace(self.record, **finite(changes))
        self.record.save(self.path)

    def end(self, status: Status, reason: str) -> str:
        """Write how the run ended; returns why that could not be written, if so."""
        try:
            self.update(status=status, reason=reason)
        except OSError as error:
            return self._end_without_room(Failure.of(error))
        return ""

    def _end_without_room(self, failed: Failure) -> str:
        """The status is worth more than the copy of the profile, a simulated trace and a picture, which make room."""
        self.record = replace(self.record, status=failed.status, reason=failed.message)
        try:
            for name in (*own_files.SPARE, *([TRACE] if self.record.source == "simulated" else [])):
                (self.path.parent / name).unlink(missing_ok=True)
            self.record.save(self.path)
        except OSError as error:
            return f"the record could not be written: {error.strerror}: {self.path}"
        return ""
