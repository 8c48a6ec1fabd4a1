"""Layer times from a trace that torch.profiler has written (Kineto's JSON) of a training step of the user's own.

    thread    |=regatta.layer: embed=|=regatta.layer: block_0=|=...   |=evaluate_function: B=|=evaluate_function: A=|
                |aten::linear|  ----------------- flow ----------------->|
    GPU             |== kernel ==| |= kernel =|                              |== kernel ==|

A layer's forward pass is what runs from the begin of its range (`annotate`) to that of the next layer's. The flows of
the trace lead from an operator to its node in the backward pass, which is the layer's, too, with the nodes that add up
its gradients. On a GPU the kernels count that are launched meanwhile, else the time of the thread. A forward pass
inside a node is a recomputation, and counts for nothing. Times are medians over the passes in the trace.
"""

from __future__ import annotations

import bisect
import difflib
import gzip
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import serialization
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, Problem

if TYPE_CHECKING:
    from torch import nn

PREFIX = "regatta.layer: "
NODE = "autograd::engine::evaluate_function: "
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN = 4
"""Names that are listed."""
Place = tuple[int, int]
"""A pass, and a layer."""


def annotate(module: nn.Module) -> Callable[[], None]:
    """Marks the forward pass of every submodule in traces of torch.profiler, by its name. Returns what takes the marks
    away.

        from harness import annotate
        annotate(model)
        with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)) as profiler:
            for inputs, targets in batches:
                loss(model(inputs), targets).backward()
                profiler.step()
        profiler.export_chrome_trace("trace.json.gz")
    """
    from torch.profiler import record_function

    open_: list[record_function] = []

    def begin(name: str) -> Callable[..., None]:
        def hook(submodule: nn.Module, inputs: Any) -> None:
            mark = record_function(PREFIX + name)
            mark.__enter__()
            open_.append(mark)

        return hook

    def end(submodule: nn.Module, inputs: Any, outputs: Any) -> None:
        open_.pop().__exit__(None, None, None)

    handles = []
    for name, submodule in module.named_modules():
        if name:
            handles.append(submodule.register_forward_pre_hook(begin(name)))
            handles.append(submodule.register_forward_hook(end, always_call=True))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def timed(profile: ModelProfile, path: Path) -> ModelProfile:
    """Returns the profile with the layers' times in a trace. Raises `CannotRun` for a file that is no such trace, or in
    which the layers cannot be distinguished."""
    trace = _Trace(_events(path), path)
    passes = trace.passes([layer.name for layer in profile.layers])
    forward, backward = trace.forward(passes), trace.backward(passes)
    layers = [
        replace(layer, forward_s=_median(forward, index, passes), backward_s=_median(backward, index, passes))
        for index, layer in enumerate(profile.layers)
    ]
    if not any(layer.backward_s for layer in layers):
        raise _refused(path, "has no backward pass of these layers", "trace loss.backward(), too")
    where = f"{trace.device or 'CPU'}, {len(passes)} forward and backward passes"
    return replace(profile, layers=tuple(layers), source=f"torch.profiler, {path.name}: {where}", times="measured")


def _median(found: Mapping[Place, float], layer: int, passes: Sequence[object]) -> float:
    return statistics.median(found.get((number, layer), 0.0) for number in range(len(passes))) * 1e-6


@dataclass
class _Event:
    """A span on a thread, in microseconds; `inside` are the nodes and ranges right inside a node."""

    name: str
    kind: str
    thread: Any
    start: float
    end: float
    arguments: dict[str, Any]
    inside: list[_Event] = field(default_factory=list)

    def holds(self, time: float) -> bool:
        return self.start <= time < self.end


class _Trace:
    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.path = path
        self.events = sorted(_spans(raw["traceEvents"]), key=lambda event: (event.start, -event.end))
        devices = raw.get("deviceProperties") or [{}]
        self.device = str(devices[0].get("name", "")) if isinstance(devices[0], dict) else ""
        self.flows = _flows(raw["traceEvents"])
        self.nodes: list[_Event] = []
        self.ranges: list[_Event] = []
        self.outer: dict[Any, list[_Event]] = defaultdict(list)
        self._nest()
        kernels: dict[Any, float] = defaultdict(float)
        for event in self.events:
            if event.kind in ON_GPU:
                kernels[event.arguments.get("correlation")] += event.end - event.start
        self.launches = [
            (event.start, event.thread, kernels[event.arguments.get("correlation")])
            for event in self.events
            if event.kind in LAUNCHES
        ]
        self.on_gpu = bool(kernels)

    def _nest(self) -> None:
        """Finds the nodes of backward passes, those that are in no other one, and the ranges of layers in none."""
        open_: dict[Any, list[_Event]] = defaultdict(list)
        for event in self.events:
            if not event.name.startswith((NODE, PREFIX)):
                continue
            around = open_[event.thread]
            while around and around[-1].end <= event.start:
                around.pop()
            if around:
                around[-1].inside.append(event)
            if event.name.startswith(NODE):
                self.nodes.append(event)
                self.outer[event.thread] += [] if around else [event]
                around.append(event)
            elif not around:
                self.ranges.append(event)

    def passes(self, layers: Sequence[str]) -> list[list[float]]:
        """Returns when each layer begins in each forward pass, and when the last one ends."""
        starts: dict[str, list[_Event]] = defaultdict(list)
        for event in self.ranges:
            starts[event.name.removeprefix(PREFIX)].append(event)
        if not starts:
            hint = "from harness import annotate; annotate(model), before the step that is traced"
            raise _refused(self.path, f"has no ranges called {PREFIX}NAME", hint)
        names = _names(layers, starts, self.path)
        found = []
        firsts = starts[names[0]]
        for first, following in zip(firsts, [*firsts[1:], None], strict=True):
            own = self._pass(first, following, [starts[name] for name in names])
            if own:
                found.append(own)
        if not found:
            message = "has no forward pass in which the layers run one after the other"
            raise _refused(self.path, message, f"layers in this order: {', '.join(names)}")
        return found

    def _pass(self, first: _Event, following: _Event | None, ranges: Sequence[Sequence[_Event]]) -> list[float]:
        """The times of one pass, () where it is not whole."""
        begun: list[float] = []
        event = first
        for own in ranges:
            later = next((one for one in own if one.start >= event.start and one.thread == first.thread), None)
            if later is None or (following and later.start >= following.start):
                return []
            begun.append(later.start)
            event = later
        return [*begun, event.end]

    def forward(self, passes: Sequence[Sequence[float]]) -> dict[Place, float]:
        """Returns the microseconds of each layer in each pass."""
        if not self.on_gpu:
            return {
                (number, layer): times[layer + 1] - times[layer]
                for number, times in enumerate(passes)
                for layer in range(len(times) - 1)
            }
        found: dict[Place, float] = defaultdict(float)
        threads = {event.thread for event in self.ranges}
        for start, thread, seconds in self.launches:
            place = _place(passes, start)
            if place and thread in threads and not self._in_node(thread, start):
                found[place] += seconds
        return found

    def _in_node(self, thread: Any, time: float) -> bool:
        outer = self.outer[thread]
        place = bisect.bisect_right(outer, time, key=lambda node: node.start)
        return place > 0 and outer[place - 1].holds(time)

    def backward(self, passes: Sequence[Sequence[float]]) -> dict[Place, float]:
        """Returns the microseconds of each layer's nodes. One without a flow is that of the one before, which has made
        the gradient that it adds up."""
        found: dict[Place, float] = defaultdict(float)
        last: dict[Any, Place | None] = {}
        for node in self.nodes:
            origin = self._origin(node)
            place = last.get(node.thread) if origin is None else _place(passes, origin)
            last[node.thread] = place
            if place:
                found[place] += self._own(node)
        return found

    def _origin(self, node: _Event) -> float | None:
        """When the operator of a node began, as the node's flow says."""
        ends = self.flows.get(node.thread, [])
        place = bisect.bisect_left(ends, (node.start, 0.0))
        if place < len(ends) and node.holds(ends[place][0]) and not any(i.holds(ends[place][0]) for i in node.inside):
            return ends[place][1]
        return None

    def _own(self, node: _Event) -> float:
        """The time of a node without that of nodes and recomputed layers inside it."""
        if not self.on_gpu:
            return node.end - node.start - sum(inside.end - inside.start for inside in node.inside)
        first = bisect.bisect_left(self.launches, node.start, key=lambda launch: launch[0])
        total = 0.0
        for start, thread, seconds in self.launches[first:]:
            if start >= node.end:
                break
            if thread == node.thread and not any(inside.holds(start) for inside in node.inside):
                total += seconds
        return total


def _place(passes: Sequence[Sequence[float]], time: float) -> Place | None:
    for number, times in enumerate(passes):
        if times[0] <= time < times[-1]:
            return number, bisect.bisect_right(times, time) - 1
    return None


def _names(layers: Sequence[str], found: Mapping[str, object], path: Path) -> list[str]:
    """The ranges of the layers: those of modules by their names, with "_" for ".". The traced module may have the model
    inside it, or be inside the model."""
    plain, first = {name.replace(".", "_"): name for name in found}, layers[0]
    around = (name.removesuffix(first) for name in plain if name.endswith(first))
    inside = (first.removesuffix(name) for name in plain if first.endswith(name))
    tries = [[prefix + layer for layer in layers] for prefix in around]
    tries += [[layer.removeprefix(prefix) for layer in layers] for prefix in inside]
    for names in tries:
        if all(name in plain for name in names):
            return [plain[name] for name in names]
    lacking = [name for name in (*tries, [*layers])[0] if name not in plain]
    shown = difflib.get_close_matches(lacking[0], plain, n=1) or [*found][:SHOWN]
    several = f"{len(lacking)} layers, the first of them" if len(lacking) > 1 else "layer"
    more = " ..." if len(found) > len(shown) else ""
    raise _refused(path, f"has no range of {several} {lacking[0]}", f"it has {', '.join(shown)}{more}")


def _events(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        found = serialization.parse(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise _refused(
            path, "is no trace of torch.profiler: it has no list traceEvents", "profiler.export_chrome_trace"
        )
    return found


def _spans(events: Sequence[Any]) -> Iterator[_Event]:
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "X":
            start, length = event.get("ts"), event.get("dur")
            if isinstance(start, (int, float)) and isinstance(length, (int, float)):
                arguments = event.get("args")
                thread = (event.get("pid"), event.get("tid"))
                yield _Event(
                    str(event.get("name")), str(event.get("cat")), thread, start, start + length,
                    arguments if isinstance(arguments, dict) else {},
                )  # fmt: skip


def _flows(events: Sequence[Any]) -> dict[Any, list[tuple[float, float]]]:
    """By thread, in order: when a node of a backward pass begins, and when its operator began."""
    begins: dict[Any, float] = {}
    ends: dict[Any, tuple[Any, float]] = {}
    for event in events:
        if isinstance(event, dict) and event.get("cat") == "fwdbwd" and isinstance(event.get("ts"), (int, float)):
            if event.get("ph") == "s":
                begins[event.get("id")] = event["ts"]
            elif event.get("ph") == "f":
                ends[event.get("id")] = ((event.get("pid"), event.get("tid")), event["ts"])
    found: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for number, (thread, time) in ends.items():
        if number in begins:
            found[thread].append((time, begins[number]))
    return {thread: sorted(own) for thread, own in found.items()}


def _refused(path: Path, message: str, hint: str = "") -> CannotRun:
    return CannotRun([Problem("trace", str(path), message, hint=hint)])
