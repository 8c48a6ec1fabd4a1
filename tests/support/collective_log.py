"""Records what a rank calls of torch.distributed, by any library: DDP's reducer, DeepSpeed, FSDP, ours.

with recording():                         in the host, before the ranks are forked
    run_session(..., train)

def train(session):                       in each rank
    with step_recorded() as log:
        session.step(batch)
    logs = gathered(log)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.runtime.transports.torch_transport import GroupTransport
from tests.support.collective_order import Call, Event, Log

UNEVEN = {"gather_", "scatter_", "alltoall_", "alltoall_base_", "allgather_", "reduce_scatter_"}
"""Collectives whose members may have tensors of other sizes."""
MESSAGES: dict[str, Literal["send", "receive"]] = {"send": "send", "recv_": "receive"}


class Recorder:
    """The log of this rank; nothing is recorded while it is None."""

    def __init__(self) -> None:
        self.log: Log | None = None
        self.kept: dict[int, tuple[int, Work]] = {}
        self.numbers = itertools.count()
        self.batches = itertools.count()
        self.local = threading.local()

    def called(self, call: Call, works: Sequence[Work]) -> None:
        """`works` are kept, so that no other one has the address of one of them."""
        if self.log is None or getattr(self.local, "unrecorded", False):
            return
        number = next(self.numbers)
        self.log.append(Event(threading.current_thread().name, number, call))
        self.kept.update((id(work), (number, work)) for work in works)

    def message(self, group: ProcessGroup, kind: Literal["send", "receive"], tensors: Any, peer: int, tag: int) -> Call:
        members = tuple(dist.get_process_group_ranks(group))
        batch = getattr(self.local, "batch", None)
        return Call(kind, group.group_name, members, _size(tensors), members[peer], tag, batch)

    def dispatched(self, operation: str, args: Sequence[Any]) -> Call:
        """The call of an operator `c10d::...`."""
        group = next(ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
        if kind := MESSAGES.get(operation):
            peer, tag = (one for one in args if isinstance(one, int))
            return self.message(group, kind, args[0], peer, tag)
        what = operation if operation in UNEVEN else f"{operation} {_size(args[0])}"
        return Call("collective", group.group_name, tuple(dist.get_process_group_ranks(group)), what)

    def waited(self, work: Work) -> None:
        if self.log is not None and id(work) in self.kept:
            self.log.append(Event(threading.current_thread().name, self.kept[id(work)][0]))


RECORDER = Recorder()


class Watch(TorchDispatchMode):
    """Sees all calls of the main thread, those that C++ makes too. (Modes of several threads at once can crash.)"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            works = [Work.unbox(one) for one in tree_leaves(out) if isinstance(one, torch.ScriptObject)]
            RECORDER.called(RECORDER.dispatched(func._schema.name.partition("::")[2], args), works)
        return out


def _in_threads(method: Callable[..., Work], kind: Literal["send", "receive"]) -> Callable[..., Work]:
    """A method of a group which records the messages of other threads than the main one."""

    def recorded_method(group: ProcessGroup, tensors: Any, peer: int, tag: int) -> Work:
        work = method(group, tensors, peer, tag)
        if threading.current_thread() is not threading.main_thread():
            RECORDER.called(RECORDER.message(group, kind, tensors, peer, tag), [work])
        return work

    return recorded_method


def _size(tensors: Any) -> str:
    found = [one for one in tree_leaves(tensors) if isinstance(one, Tensor)]
    return f"{sum(one.nbytes for one in found)} bytes of {found[0].dtype}" if found else ""


@contextmanager
def recording() -> Iterator[None]:
    """Ranks that are forked within it can record, their threads too, which only send and receive.

    The words that go ahead of messages are not recorded: they go by gloo on GPUs, too.
    """
    wait, batch = Work.wait, dist.batch_isend_irecv

    def waited(work: Work, *args: Any, **kwargs: Any) -> Any:
        RECORDER.waited(work)
        return wait(work, *args, **kwargs)

    def batched(messages: list[dist.P2POp]) -> Any:
        RECORDER.local.batch = next(RECORDER.batches)
        try:
            return batch(messages)
        finally:
            RECORDER.local.batch = None

    with pytest.MonkeyPatch.context() as patch:
        for method, kind in ("send", "send"), ("recv", "receive"):
            patch.setattr(ProcessGroup, method, _in_threads(getattr(ProcessGroup, method), kind))
        for word in "_say", "_hear":
            patch.setattr(GroupTransport, word, unrecorded(getattr(GroupTransport, word)))
        patch.setattr(Work, "wait", waited)
        patch.setattr(dist, "batch_isend_irecv", batched)
        yield


def unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls of torch.distributed are not recorded."""

    def called(*args: Any, **kwargs: Any) -> Any:
        RECORDER.local.unrecorded = True
        try:
            return function(*args, **kwargs)
        finally:
            RECORDER.local.unrecorded = False

    return called


@contextmanager
def step_recorded() -> Iterator[Log]:
    """What this rank calls within it."""
    log: Log = []
    RECORDER.log = log
    try:
        with Watch():
            yield log
    finally:
        RECORDER.log = None
        RECORDER.kept.clear()


def gathered(log: Log) -> list[Log]:
    """The logs of all ranks."""
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, log)
    return logs


def recorded(run: Callable[[], Any]) -> list[Log]:
    """The logs of all ranks of what `run` calls."""
    with step_recorded() as log:
        run()
    return gathered(log)
