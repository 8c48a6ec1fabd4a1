"""One operation of a schedule, and its short notation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast, dataclass_transform, get_args

Kind = Literal["F", "B", "W", "R", "send", "recv", "copy", "collective", "step"]
Queue = Literal["compute", "copy in", "copy out", "network", "host"]
COMPUTE = ("F", "B", "W", "R", "step")
_T = TypeVar("_T")
_KINDS = frozenset(get_args(Kind))  # looked up once, not for each op: a schedule has hundreds of thousands
_NOTATION = re.compile(r"(\d+)(send|recv|copy|collective|step|[FBWR])(\d*)(?:<(\d+))?(?::(.+))?")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _value(kind: type[_T]) -> type[_T]:
    """A dataclass whose objects no code changes, which mypy checks. At run time they are not frozen: that makes each
    of the hundreds of thousands of a schedule take five times as long."""
    return dataclass(slots=True, unsafe_hash=True)(kind)


@_value
class Op:
    """`kind` on `micro_batch` at `stage`.

        2F0          stage 2, forward of micro-batch 0        2R0  its recomputation     2B0  its backward
        3copy0<2     micro-batch 0 from stage 2 to stage 3    2copy0<3  its gradient in the backward pass
        3copy0<0:up  the skip "up" of micro-batch 0, directly from stage 0 to stage 3
        1step        the optimizer of stage 1

    `part` names a skip, bucket or chunk, `peer` the other stage of a message. `bytes`, `queue` and `seconds`, where
    they are known, say what it costs and where it runs; `buffers` are the bytes of each call, where a collective stands
    for several; `overlaps` is the kind of the task during which such calls run, all but one, where a device
    communicates while it computes, and the share of the task's time that they may take. They are not part of the
    notation, nor of equality.
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None
    part: str = ""
    peer: int | None = None
    bytes: int = field(default=0, compare=False)
    queue: Queue = field(default="compute", compare=False)
    seconds: float | None = field(default=None, compare=False)
    buffers: tuple[int, ...] = field(default=(), compare=False)
    overlaps: tuple[Kind, float] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"an op's kind is one of {', '.join(get_args(Kind))}, not {self.kind!r}")

    def __str__(self) -> str:
        batch = "" if self.micro_batch is None else self.micro_batch
        peer = "" if self.peer is None else f"<{self.peer}"
        part = f":{self.part}" if self.part else ""
        return f"{self.stage}{self.kind}{batch}{peer}{part}"

    @staticmethod
    def parse(text: str) -> Op:
        """Inverts `str`; raises ValueError for anything that is not an op."""
        match = _NOTATION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an op: expected something like 2F0, 2B0, 3copy0<2 or 1step")
        stage, kind, batch, peer, part = match.groups()
        return Op(
            int(stage),
            cast(Kind, kind),
            int(batch) if batch else None,
            part or "",
            int(peer) if peer else None,
            queue="copy in" if kind == "copy" else "compute",
        )

    @property
    def calls(self) -> int:
        """How many calls a collective stands for."""
        return max(1, len(self.buffers))

    @property
    def forward(self) -> bool:
        """True for a forward task and for a message of activations, not gradients."""
        if self.peer is None or self.kind not in ("copy", "recv", "send"):
            return self.kind == "F"
        return self.peer > self.stage if self.kind == "send" else self.peer < self.stage
