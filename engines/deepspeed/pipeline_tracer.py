"""Record the instructions of DeepSpeed's pipeline loop as ops of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe import p2p

from engines.deepspeed.collective_tracer import CollectiveTracer
from engines.deepspeed.session import DeepSpeedSession
from harness.core.op import Kind, Op
from harness.runtime.device_clock import TimePoint
from harness.runtime.session import place
from harness.runtime.values import tensors_of
from harness.schedule.builders.data_parallel import over_replicas

Note = Callable[[int, TimePoint, TimePoint, Sequence[Op]], None]
MESSAGES: dict[str, tuple[Kind, int]] = {
    "SendActivation": ("send", 1),
    "RecvGrad": ("recv", 1),
    "RecvActivation": ("recv", -1),
    "SendGrad": ("send", -1),
}
"""Instruction -> message op, and its direction: to the next stage (1) or the previous one (-1)."""
GRADIENTS = ("RecvGrad", "SendGrad")
KINDS = {"ForwardPass": "F", "BackwardPass": "B", "OptimizerStep": "step"}
SENT = {(1, False): "activations", (-1, False): "gradients", (1, True): "skips", (-1, True): "skip_gradients"}


class PipelineTracer:
    """Takes the place of every instruction in the table of `engine`, and notes in `session` when it ran.

    Instructions of one kind come in the order of the micro-batches.
    """

    def __init__(self, session: DeepSpeedSession, engine: Any, traffic: CollectiveTracer, ties: Sequence[Op]) -> None:
        self.session, self.engine, self.stage, self.traffic = session, engine, session.stage, traffic
        self.ties = ties
        self.parts: list[str] = []
        self.done: Counter[str] = Counter()
        # when tensors of the current instruction were sent or received
        self.passed: list[tuple[TimePoint, TimePoint]] = []
        p2p.send, p2p.recv = self._passing(p2p.send), self._passing(p2p.recv)
        table = engine._INSTRUCTION_MAP
        engine._INSTRUCTION_MAP = {kind: self._watched(kind.__name__, work) for kind, work in table.items()}

    def _passing(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*arguments: Any) -> Any:
            start = self.session.now()
            result = work(*arguments)
            self.passed.append((start, self.session.now()))
            return result

        return passing

    def begin(self) -> None:
        """A new step."""
        self.done.clear()
        self.traffic.take()

    def _watched(self, name: str, work: Callable[..., None]) -> Callable[..., None]:
        after: dict[str, Note] = {
            "ForwardPass": self._forward,
            "BackwardPass": self._backward,
            "ReduceTiedGrads": self._tied,
            "ReduceGrads": self._reduced,
            "OptimizerStep": self._stepped,
            **dict.fromkeys(MESSAGES, self._message),
        }

        def watched(engine: Any, **buffer: int) -> None:
            i = self.done[name]
            self.done[name] += 1
            if name in ("ForwardPass", "BackwardPass"):
                again = self.stage.recomputes and name == "BackwardPass"
                self.session.use_micro_batch(i, again)
            ops = []
            if name == "SendGrad":  # its tensors are gone afterwards
                ops = self._messages(i, name, **buffer)
                self._fill_gradients(**buffer)
            self.passed = []
            start = self.session.now()
            where = place(KINDS.get(name, name), self.session.global_micro_batch(i))
            with self.session.phase(where, waits=name in MESSAGES):
                work(engine, **buffer)
            end = self.session.now()
            if name in MESSAGES:
                ops = ops or self._messages(i, name, **buffer)
            if name in after:
                after[name](i, start, end, ops)

        return watched

    def _messages(self, i: int, name: str, buffer_id: int) -> list[Op]:
        """Return one message for the layer's values and one for each skip; a gradient is as large as its activation,
        that of integers has no bytes. `parts` are the names of the tensors that pass, "" for the layer's values."""
        kind, step = MESSAGES[name]
        skips = self.stage.leaving if step > 0 else self.stage.arriving
        tensors = tensors_of(self.engine.pipe_buffers["outputs" if step > 0 else "inputs"][buffer_id])
        parts = zip([*[""] * (len(tensors) - len(skips)), *skips], tensors, strict=True)
        passing = [(part, t) for part, t in parts if name not in GRADIENTS or t.is_floating_point()]
        sizes = dict.fromkeys(["", *skips], 0)
        for part, t in passing:
            sizes[part] += t.numel() * t.element_size()
        self.parts, j = [part for part, _ in passing], self.stage.number
        return [Op(j, kind, i, part, j + step, size) for part, size in sizes.items()]

    def _fill_gradients(self, buffer_id: int) -> None:
        """Give zeros as a gradient to inputs that the stage detaches, compares or does not use: DeepSpeed sends one for
        each tensor of numbers, and asserts that it is there."""
        for value in tensors_of(self.engine.pipe_buffers["inputs"][buffer_id]):
            if value.is_floating_point() and value.grad is None:
                value.grad = torch.zeros_like(value)

    def _forward(self, i: int, start: TimePoint, end: TimePoint, ops: Sequence[Op]) -> None:
        self.session.record(Op(self.stage.number, "F", i), start, end)

    def _backward(self, i: int, start: TimePoint, end: TimePoint, ops: Sequence[Op]) -> None:
        if self.stage.recomputes:
            self.session.record(Op(self.stage.number, "R", i), start, self.session.forward_end)
            start = self.session.forward_end
        self.session.record(Op(self.stage.number, "B", i), start, end)

    def _message(self, i: int, start: TimePoint, end: TimePoint, ops: Sequence[Op]) -> None:
        """Before the first message of a run go the shapes. One without a tensor takes no time, after the one before."""
        passed = list(zip(self.parts, self.passed[len(self.passed) - len(self.parts) :], strict=True))
        ended = start
        for op in ops:
            times = [time for part, time in passed if part == op.part]
            began, ended = (times[0][0], times[-1][1]) if times else (ended, ended)
            self.session.record(op, began, ended)
            if op.kind == "send" and op.peer is not None:
                self.session.bytes_sent[SENT[op.peer - op.stage, bool(op.part)]] += op.bytes

    def _tied(self, i: int, start: TimePoint, end: TimePoint, ops: Sequence[Op]) -> None:
        self.session.record_in_sequence(self.ties, start, end)
        for op in self.ties:
            self.session.bytes_sent[op.part.partition("/")[0]] += op.bytes
        self.traffic.take()

    def _reduced(self, i: int, start: TimePoint, end: TimePoint, ops: Sequence[Op]) -> None:
        """Over the replicas."""
        _, sizes = self.traffic.take()
        for algorithm, size in sizes.items():
            self.session.record(over_replicas(self.stage.number, algorithm, size), start, end)
            self.session.bytes_sent[algorithm] += size

    def _stepped(self, i: int, start: TimePoint, end: TimePoint, ops: Sequence[Op]) -> None:
        """Record the optimizer step; if its state is sharded, the weights are gathered at the end."""
        session, stage = self.session, self.stage.number
        held, sizes = self.traffic.take()
        session.bytes_sent += sizes

        def add() -> None:
            start_s, end_s = session.clock.seconds(start), session.clock.seconds(end)
            last_s = end_s - session.clock.total_s(held["all_gather"])
            session.add_span(Op(stage, "step"), start_s, last_s)
            if sizes["all_gather"]:
                session.add_span(over_replicas(stage, "all_gather", sizes["all_gather"]), last_s, end_s)

        session.record_later(add)
