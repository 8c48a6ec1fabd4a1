"""Reads a file of JSON lines while another process writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Tail:
    """The lines of `path` that have come since the last look; a line that is still being written waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read = 0

    def new(self) -> list[dict[str, Any]]:
        try:
            if self.path.stat().st_size == self.read:
                return []
        except FileNotFoundError:
            return []
        with self.path.open("rb") as file:
            file.seek(self.read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
