"""Transports send messages between stages: the interface, and the bookkeeping that every transport needs.

    stage 1 <-- "" forward ---- stage 0 <-- "" backward -- stage 1      each direction and each skip is a channel
    posted     | 3 |            the receive of the next micro-batch is there before the message is
    first      header, tensors  the form (shapes, dtypes) goes ahead, once for each channel and number of samples
    then       tensors          tagged with the micro-batch

A channel's micro-batches come in the order in which its sender runs them, which is that of the schedule: forward and
backward tasks each stay in line, whatever the policy.

Targets are no messages: every rank makes the whole batch (`harness.runtime.distributed_session`), so the last stage
has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.core.op import Op
from harness.core.problem import Problem, ProblemError
from harness.runtime.stage_passes import DTYPES

AHEAD = 1
"""Receives that are posted on each channel before their messages come: each has its buffer all the time."""
HEADER = 1024
"""Numbers in a header: how many tensors; of each its dtype, its dimensions and their sizes."""
Form = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Channel:
    """A channel from one stage to another, for the activations between layers ("") or of the skip `part`, or for
    gradients."""

    source: int
    target: int
    part: str = ""

    @property
    def forward(self) -> bool:
        return self.source < self.target

    @property
    def back(self) -> Channel:
        """The channel of its gradients."""
        return Channel(self.target, self.source, self.part)

    def op(self, micro_batch: int, size: int = 0) -> Op:
        """Return the op of a message of `size` bytes, for schedule and trace."""
        return Op(self.target, "copy", micro_batch, self.part, self.source, size, "network")


@dataclass(frozen=True)
class Coming:
    """A message that is expected, or sent: a micro-batch and how many samples it has."""

    micro_batch: int
    samples: int


@dataclass(frozen=True)
class Arrival:
    """A message that was there at `at_s`, seconds of this process' clock; None if it was there before it was asked
    for."""

    channel: Channel
    micro_batch: int
    tensors: list[Tensor]
    at_s: float | None


@dataclass(frozen=True)
class Position:
    """A rank in the grid of replicas and devices of a pipeline; `devices[j]` is the device of stage j."""

    rank: int
    device: int
    devices: tuple[int, ...]
    replicas: int

    @property
    def width(self) -> int:
        """Devices of a pipeline."""
        return max(self.devices) + 1

    def has(self, stage: int) -> bool:
        """Whether a stage runs here."""
        return self.devices[stage] == self.device

    def peer(self, stage: int) -> int:
        """The rank of a stage of this replica."""
        return self.rank + self.devices[stage] - self.device


@dataclass(frozen=True)
class Completed:
    """All tensors of a receive are there."""

    channel: Channel
    micro_batch: int
    at_s: float | None


class Transport(ABC):
    """One rank's endpoint. `channels` are those of the whole pipeline, in the same order on every rank; each connects
    stages on two devices."""

    def __init__(
        self, position: Position, channels: Sequence[Channel], micro_batches: int, device: torch.device
    ) -> None:
        self.position, self.device = position, device
        self.micro_batches = micro_batches
        self.numbers = {channel: number for number, channel in enumerate(channels)}
        self.into = [channel for channel in channels if position.has(channel.target)]
        self._reported: dict[tuple[Channel, int], Form] = {}
        self._known: dict[tuple[Channel, int], Form] = {}
        self._coming: dict[Channel, deque[Coming]] = {}
        self._posted: dict[Channel, dict[int, list[Tensor]]] = {}
        self._asked: dict[Channel, Coming] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """What the record's manifest has of the library that sends messages, where a run depends on it."""
        return {}

    # -- what a session calls -----------------------------------------------------------------------------------------

    def begin(self, coming: Mapping[Channel, Sequence[Coming]]) -> None:
        """A step begins, in which this comes in on each channel, in this order."""
        self._coming = {channel: deque(coming[channel]) for channel in self.into}
        self._posted = {channel: {} for channel in self.into}
        self._asked = {}
        for channel in self.into:
            self._ahead(channel)

    def send(self, channel: Channel, what: Coming, tensors: Sequence[Tensor]) -> int:
        """Send without blocking and return the number of bytes; tensors must not change until `finish`.

        Raises ProblemError where their form is another one than before, for the same number of samples.
        """
        form = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
        known = self._reported.setdefault((channel, what.samples), form)
        if known is form:
            self._send(channel, what.micro_batch, [_header(form).to(self.device, non_blocking=True)])
        elif known != form:
            message = f"has {what.samples} samples and the form {form}, an earlier message of as many had {known}"
            raise ProblemError(Problem(str(channel.op(what.micro_batch)), None, message, hint="inputs of one shape"))
        self._send(channel, what.micro_batch, [tensor.contiguous() for tensor in tensors])
        return sum(tensor.nbytes for tensor in tensors)

    def arrived(self, wait: bool) -> list[Arrival]:
        """Return the messages since the last call in order of arrival; with `wait`, at least one."""
        while True:
            matched = [self._matched(one) for one in self._completed(wait)]
            found = [arrival for arrival in matched if arrival is not None]
            if found or not wait:
                return found

    def receive(self, channel: Channel) -> list[Arrival]:
        """Wait for a message of a channel; return it, or others that have come, where the transport cannot choose."""
        return self.arrived(wait=True)

    def delivered(self, channel: Channel, micro_batch: int) -> None:
        """The receiver has used what was sent: nobody needs it here any more."""
        return

    @abstractmethod
    def finish(self) -> None:
        """Wait until all that was sent has left."""

    @abstractmethod
    def close(self) -> None:
        """No message will be sent or received any more."""

    # -- what a transport does ----------------------------------------------------------------------------------------

    @abstractmethod
    def _send(self, channel: Channel, micro_batch: int, tensors: list[Tensor]) -> None:
        """Begin to send contiguous tensors."""

    @abstractmethod
    def _receive(self, channel: Channel, micro_batch: int, buffers: list[Tensor]) -> None:
        """Begin to receive what was sent in one call of `_send`."""

    @abstractmethod
    def _completed(self, wait: bool) -> list[Completed]:
        """Receives that have ended, in the order in which they did; with `wait` at least one."""

    def tag(self, channel: Channel, micro_batch: int) -> int:
        """A number for each message of a step."""
        return self.numbers[channel] * self.micro_batches + micro_batch

    def point(self) -> torch.cuda.Event | None:
        """This point in the work of the calling thread's stream."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    # -- receives ahead -----------------------------------------------------------------------------------------------

    def _ahead(self, channel: Channel) -> None:
        """Post receives until there are enough. One whose form is not known gets its header first, the others wait."""
        posted, coming = self._posted[channel], self._coming[channel]
        while coming and len(posted) < AHEAD and channel not in self._asked:
            what = coming.popleft()
            if (channel, what.samples) in self._known:
                self._post(channel, what)
            else:
                self._asked[channel] = what
                posted[what.micro_batch] = [torch.zeros(HEADER, dtype=torch.long, device=self.device)]
                self._receive(channel, what.micro_batch, posted[what.micro_batch])

    def _post(self, channel: Channel, what: Coming) -> None:
        form = self._known[channel, what.samples]
        buffers = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in form]
        self._posted[channel][what.micro_batch] = buffers
        self._receive(channel, what.micro_batch, buffers)

    def _matched(self, one: Completed) -> Arrival | None:
        """Return the message that was received; None if it was a header, whose message is posted now."""
        channel = one.channel
        tensors = self._posted[channel].pop(one.micro_batch)
        asked = self._asked.get(channel)
        if asked is not None and asked.micro_batch == one.micro_batch:
            del self._asked[channel]
            self._known[channel, asked.samples] = _form(tensors[0])
            self._post(channel, asked)
            self._ahead(channel)
            return None
        self._ahead(channel)
        return Arrival(channel, one.micro_batch, tensors, one.at_s)


def _header(form: Form) -> Tensor:
    numbers = [len(form)]
    for dtype, shape in form:
        numbers += [DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > HEADER:
        key = f"{len(form)} tensors"
        message = f"go from stage to stage at once, which need a header of {len(numbers)} numbers, there are {HEADER}"
        raise ProblemError(Problem(key, None, message, hint="fewer tensors in a layer's output"))
    return torch.tensor(numbers + [0] * (HEADER - len(numbers)))


def _form(header: Tensor) -> Form:
    numbers = deque(header.tolist())
    found = []
    for _ in range(numbers.popleft()):
        dtype, dimensions = DTYPES[numbers.popleft()], numbers.popleft()
        found.append((dtype, tuple(numbers.popleft() for _ in range(dimensions))))
    return tuple(found)
