"""A tracker for tests."""

from __future__ import annotations


class Recorder:
    """A tracker that keeps what it is reported."""

    def __init__(self) -> None:
        self.reported: list[tuple] = []

    def start(self, *arguments) -> None:
        self.reported.append(("start", *arguments))

    def log(self, step, metrics) -> None:
        self.reported.append(("log", step, metrics))

    def finish(self, summary, images, status) -> None:
        self.reported.append(("finish", summary, images, status))
