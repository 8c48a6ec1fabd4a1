"""Messages by torch.distributed, for who takes what comes first, and for who knows what comes next.

    TorchTransport   main      send(2) ---.                            .--> arrived
                     thread                '-> dist.send   dist.recv --'
    DirectTransport  main      dist.isend, dist.irecv ... wait for a certain message

Gloo cannot be asked whether a message is there, so `arrived` takes a thread for each channel and end. Whoever receives
in a fixed order needs none, and has no threads that take the interpreter from it.

On GPUs (NCCL) each channel has a group and a stream of its own, so that messages of two channels never wait for each
other. NCCL makes the connection of a pair of ranks when it is first used, and both must be there: with receives posted
ahead each could wait for the other one. So every channel is used once before.

A receive of NCCL is a kernel, which takes a part of the GPU for as long as it waits, and NCCL matches messages by their
order alone. So the sender first says by gloo, in a word, which message is made and comes now, and the receive is begun
then:

    sender     makes 3 ==|-- "3" --|== send 3 ==|
    receiver   waits asleep       -|== recv 3 ==|

That part has been tested without GPUs only: it needs two.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.runtime.collectives import new_group, patience
from harness.runtime.transports.transport import Arrival, Channel, Completed, Position, Transport

CTAS = 4
"""Thread blocks that a message of NCCL has at most; up to 32 by itself. What is best has not been measured."""
AT_ONCE_S = 1e-4
"""Within which a wait ends for a message that is there."""
T = TypeVar("T")
Job = Callable[[], None] | None


class GroupTransport(Transport):
    """Has a process group for each channel on GPUs, and has used each channel once."""

    def __init__(
        self, position: Position, channels: Sequence[Channel], micro_batches: int, device: torch.device
    ) -> None:
        super().__init__(position, channels, micro_batches, device)
        self._groups = self._opened(channels) if self.ignores_tags(device) else {}
        self._use(channels)

    @staticmethod
    def ignores_tags(device: torch.device) -> bool:
        """Whether the messages of two channels between the same ranks could be mixed up, as NCCL's could."""
        return device.type == "cuda"

    def _opened(self, channels: Sequence[Channel]) -> dict[Channel, dist.ProcessGroup]:
        """Every rank opens all groups of all replicas, in the same order."""
        width, devices, own = self.position.width, self.position.devices, {}
        for first in range(0, self.position.replicas * width, width):
            for channel in channels:
                ends = [first + devices[channel.source], first + devices[channel.target]]
                group = new_group(ends, _few_ctas() if self.device.type == "cuda" else None)
                if first == self.position.rank // width * width:
                    own[channel] = group
        return own

    def _use(self, channels: Sequence[Channel]) -> None:
        """Send one message on each channel of this rank, in the same order on every rank so that no cycle of waits
        forms."""
        nothing = torch.zeros(1, device=self.device)
        for channel in channels:
            group = self._groups.get(channel)
            if self.position.has(channel.source):
                dist.send(nothing, self.position.peer(channel.target), group)
            elif self.position.has(channel.target):
                dist.recv(nothing, self.position.peer(channel.source), group)
        self._synchronize()

    @property
    def _announces(self) -> bool:
        """Whether a word goes ahead of each message."""
        return self.device.type == "cuda"

    def _word_tag(self, channel: Channel) -> int:
        return len(self.numbers) * self.micro_batches + self.numbers[channel]

    def _say(self, channel: Channel, micro_batch: int) -> tuple[dist.Work, Tensor]:
        """Tell the receiver that the message of a micro-batch comes next; the word stays until it has left."""
        word, peer = torch.tensor([micro_batch]), self.position.peer(channel.target)
        work = dist.isend(word, peer, self._groups.get(channel), self._word_tag(channel))
        assert work is not None
        return work, word

    def _hear(self, channel: Channel, micro_batch: int) -> None:
        """Sleep until the message of a micro-batch comes next. Raises RuntimeError if another one does."""
        word, peer = torch.zeros(1, dtype=torch.long), self.position.peer(channel.source)
        dist.recv(word, peer, self._groups.get(channel), self._word_tag(channel))
        if int(word) != micro_batch:
            raise RuntimeError(f"{channel.op(micro_batch)} is expected, and {channel.op(int(word))} comes")

    def _synchronize(self) -> None:
        """Sleep until this thread's stream has done its work: waiting for the stream itself would spin."""
        if self.device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(self.device))
            done.synchronize()


def _few_ctas() -> Any:
    """NCCL's options of a channel: a message takes few of a GPU's multiprocessors from what computes meanwhile."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = patience()
    options.config.max_ctas = CTAS
    return options


class TorchTransport(GroupTransport):
    """Takes messages in the order in which they arrive."""

    def __init__(
        self, position: Position, channels: Sequence[Channel], micro_batches: int, device: torch.device
    ) -> None:
        super().__init__(position, channels, micro_batches, device)
        self._jobs: dict[Channel, SimpleQueue[Job]] = {}
        self._received: SimpleQueue[Completed | Exception] = SimpleQueue()
        self._sent: SimpleQueue[Exception | None] = SimpleQueue()
        self._sending = 0
        for channel in channels:
            if position.has(channel.source) or position.has(channel.target):
                jobs: SimpleQueue[Job] = SimpleQueue()
                self._jobs[channel] = jobs
                threading.Thread(target=self._work, args=(jobs,), name=str(channel.op(0)), daemon=True).start()

    def _send(self, channel: Channel, micro_batch: int, tensors: list[Tensor]) -> None:
        peer, tag, group = self.position.peer(channel.target), self.tag(channel, micro_batch), self._groups.get(channel)
        made = self.point()

        def job() -> None:
            try:
                self._after(made)
                if self._announces:
                    self._synchronize()
                    self._say(channel, micro_batch)[0].wait()
                for tensor in tensors:
                    dist.send(tensor, peer, group, tag)
                self._synchronize()
                self._sent.put(None)
            except Exception as error:
                self._sent.put(error)

        self._sending += 1
        self._jobs[channel].put(job)

    def _receive(self, channel: Channel, micro_batch: int, buffers: list[Tensor]) -> None:
        peer, tag, group = self.position.peer(channel.source), self.tag(channel, micro_batch), self._groups.get(channel)
        free = self.point()  # what the buffers' memory was before may still be read

        def job() -> None:
            try:
                self._after(free)
                if self._announces:
                    self._hear(channel, micro_batch)
                for buffer in buffers:
                    dist.recv(buffer, peer, group, tag)
                self._synchronize()
                self._received.put(Completed(channel, micro_batch, time.perf_counter()))
            except Exception as error:
                self._received.put(error)

        self._jobs[channel].put(job)

    def _after(self, point: torch.cuda.Event | None) -> None:
        """The stream of this thread's channel continues from there."""
        if point:
            torch.cuda.current_stream(self.device).wait_event(point)

    def _completed(self, wait: bool) -> list[Completed]:
        found = []
        while wait or not self._received.empty():
            one = _got(self._received, f"device {self.position.device} has waited {patience()} for a message")
            if isinstance(one, Exception):
                raise one
            found.append(one)
            wait = False
        return found

    def finish(self) -> None:
        for _ in range(self._sending):
            error = _got(self._sent, f"device {self.position.device} has waited {patience()} for its messages to leave")
            if error is not None:
                raise error
        self._sending = 0

    def close(self) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)

    def _work(self, jobs: SimpleQueue[Job]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
        while (job := jobs.get()) is not None:
            job()
            del job  # it holds tensors


def _got(queue: SimpleQueue[T], late: str) -> T:
    try:
        return queue.get(timeout=patience().total_seconds())
    except Empty:
        raise TimeoutError(late) from None


class DirectTransport(GroupTransport):
    """Waits for the messages that its rank asks for; none is taken earlier.

    What was sent is kept until `delivered`, or until the end of the step.
    """

    def __init__(
        self, position: Position, channels: Sequence[Channel], micro_batches: int, device: torch.device
    ) -> None:
        super().__init__(position, channels, micro_batches, device)
        self._receiving: dict[Channel, deque[tuple[int, list[Tensor], list[dist.Work]]]] = {
            one: deque() for one in self.into
        }
        self._sending: dict[tuple[Channel, int], list[tuple[dist.Work, Tensor]]] = defaultdict(list)

    def receive(self, channel: Channel) -> list[Arrival]:
        while True:
            micro_batch, buffers, works = self._receiving[channel].popleft()
            began_s = time.perf_counter()
            if self._announces:
                self._hear(channel, micro_batch)
                works = self._begun(channel, micro_batch, buffers)
            for work in works:
                work.wait()
            at_s = time.perf_counter()
            waited = at_s - began_s > AT_ONCE_S
            arrival = self._matched(Completed(channel, micro_batch, at_s if waited else None))
            if arrival is not None:
                return [arrival]

    def delivered(self, channel: Channel, micro_batch: int) -> None:
        for work, _ in self._sending.pop((channel, micro_batch), ()):
            work.wait()

    def _send(self, channel: Channel, micro_batch: int, tensors: list[Tensor]) -> None:
        peer, tag, group = self.position.peer(channel.target), self.tag(channel, micro_batch), self._groups.get(channel)
        if self._announces:
            self._sending[channel, micro_batch].append(self._say(channel, micro_batch))
        for tensor in tensors:
            work = dist.isend(tensor, peer, group, tag)
            assert work is not None
            self._sending[channel, micro_batch].append((work, tensor))

    def _receive(self, channel: Channel, micro_batch: int, buffers: list[Tensor]) -> None:
        works = [] if self._announces else self._begun(channel, micro_batch, buffers)
        self._receiving[channel].append((micro_batch, buffers, works))

    def _begun(self, channel: Channel, micro_batch: int, buffers: list[Tensor]) -> list[dist.Work]:
        """Begin to receive into buffers."""
        peer, tag, group = self.position.peer(channel.source), self.tag(channel, micro_batch), self._groups.get(channel)
        works = [dist.irecv(buffer, peer, group, tag) for buffer in buffers]
        return [work for work in works if work is not None]

    def _completed(self, wait: bool) -> list[Completed]:
        raise NotImplementedError("a message is received by `receive`")

    def finish(self) -> None:
        for message in list(self._sending):
            self.delivered(*message)

    def close(self) -> None:
        """There is nothing to end."""
