"""GPUs on a machine without any: tensors are on the CPU and say that they are on a GPU, streams are clocks.

    with fake_gpus() as order:
        GPipe(module, [2, 2], ["cuda:0", "cuda:1"], 4)(x)
    assert order.faults == []

Kernels run at once, in the order in which the host launches them; what a GPU could do in another order is a fault
(tests/support/stream_order.py). As on a GPU

* a kernel runs in the current stream of its tensors' device, a copy between devices in those of both ends;
* a copy from or to pageable memory, a number that is read (`item`, `float`) and `synchronize` make the host wait;
* memory belongs to the stream that was current when it was allocated, and goes back to it when the last tensor dies;
* a collective or message runs in a stream of its own after the current one, and `Work.wait` makes the current one wait.

tests/support/fake_cuda.py is less: it only records what streams and events are asked for, at times that a test sets.

Autograd's threads are not there: backward passes run in the streams of their caller's thread.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.launch import process_group
from tests.support.stream_order import HOST, Range, StreamOrder

READ_BY_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
"""Kernels whose result the host waits for."""
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "record_stream", "set_"}


class Machine:
    """What the fakes share. `gpu` has the number of the GPU of each storage that is on one."""

    def __init__(self) -> None:
        self.order = StreamOrder()
        self.gpu: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.names = itertools.count()
        self.works: dict[int, tuple[str, Work]] = {}
        self.local = threading.local()
        self.lock = threading.RLock()
        self.known: set[int] = set()
        self.device = 0

    def stream(self, gpu: int) -> Stream:
        """The current stream of this thread on a GPU."""
        streams: dict[int, Stream] = self.local.__dict__.setdefault("streams", {})
        if gpu not in streams:
            streams[gpu] = Stream(f"cuda:{gpu}", name=f"gpu {gpu}")
        return streams[gpu]

    def of(self, tensor: Tensor) -> int | None:
        return self.gpu.get(_block(tensor))

    def allocated(self, tensor: Tensor, gpu: int | None) -> None:
        """Memory is new: on a GPU it belongs to the current stream."""
        block = _block(tensor)
        if block in self.known:
            return
        self.known.add(block)
        weakref.finalize(tensor.untyped_storage(), self.died, block)
        if gpu is not None:
            self.gpu[block] = gpu
        self.order.allocate(block, HOST if gpu is None else self.stream(gpu).name)

    def died(self, block: int) -> None:
        with self.lock:
            self.known.discard(block)
            self.pinned.discard(block)
            self.order.free(block)
            self.gpu.pop(block, None)

    def host_waits(self, stream: str) -> None:
        self.order.join(HOST, self.order.clock(stream))


MACHINE = Machine()


def _block(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _range(tensor: Tensor) -> Range:
    """The bytes that a tensor may touch."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Range(_block(tensor), first, first + (reach + 1) * size)


def _number(device: Any) -> int | None:
    """The number of a GPU that a device is; None for the host."""
    if isinstance(device, int):
        return device
    found = torch.device(device)
    return None if found.type != "cuda" else MACHINE.device if found.index is None else found.index


def _current(device: Any = None) -> Stream:
    """torch.cuda.current_stream."""
    return MACHINE.stream(MACHINE.device if device is None else _number(device) or 0)


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, name: str = "") -> None:
        self.gpu = MACHINE.device if device is None else _number(device) or 0
        self.device = torch.device("cuda", self.gpu)
        self.name = name or f"gpu {self.gpu}, stream {next(MACHINE.names)}"

    def wait_stream(self, other: Stream) -> None:
        MACHINE.order.join(self.name, MACHINE.order.clock(other.name))
        MACHINE.order.join(self.name, MACHINE.order.clock(HOST))

    def wait_event(self, event: Event) -> None:
        MACHINE.order.join(self.name, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        MACHINE.host_waits(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: dict[str, int] = {}
        self.at_s = 0.0
        self.asked = False

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(MACHINE.order.clock((stream or _current()).name))
        self.at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _current()).wait_event(self)

    def synchronize(self) -> None:
        MACHINE.order.join(HOST, self.clock)

    def query(self) -> bool:
        """Whether the GPU has come there: it has not when one looks for the first time."""
        if not self.asked:
            self.asked = True
            return False
        self.synchronize()
        return True

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1e3


class _Generator(torch.Generator):
    """torch.Generator of any device."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _Devices(TorchFunctionMode):
    """Tensors that say that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and owner in ("device", "is_cuda"):
            gpu = MACHINE.of(args[0])
            here = func(*args)
            return here if gpu is None else (True if owner == "is_cuda" else torch.device("cuda", gpu))
        if name == "get_device":
            return -1 if (gpu := MACHINE.of(args[0])) is None else gpu
        if name in ("tolist", "numpy") and (gpu := MACHINE.of(args[0])) is not None:
            MACHINE.host_waits(MACHINE.stream(gpu).name)
        if name in ("is_pinned", "pin_memory"):
            return _pinned(name, args[0])
        if name == "new_tensor" and "device" not in kwargs and (gpu := MACHINE.of(args[0])) is not None:
            kwargs["device"] = gpu
        if name in ("to", "cuda", "cpu"):
            return _moved(func, name, args, kwargs)
        return _made(func, args, kwargs)


def _pinned(name: str, tensor: Tensor) -> Any:
    if name == "is_pinned":
        return _block(tensor) in MACHINE.pinned
    copy = tensor.clone()
    MACHINE.pinned.add(_block(copy))
    return copy


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function that may take a device, whose result is then on it."""
    wanted, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
    if wanted is None or not _here(wanted):
        out = func(*args, **kwargs)
    else:
        with _elsewhere(_number(wanted)):
            out = func(*args, **(kwargs | {"device": "cpu"}))
    if pinned:
        MACHINE.pinned.add(_block(out))
    return out


def _here(device: Any) -> bool:
    """Whether a device is the host or one of the GPUs: there are others, such as "meta"."""
    return isinstance(device, int) or torch.device(device).type in ("cpu", "cuda")


def _moved(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`to`, `cuda`, `cpu`: a copy in the streams of both ends, where a tensor is not there yet."""
    tensor, dtype, flags = args[0], kwargs.get("dtype"), []
    wanted = {"cuda": f"cuda:{MACHINE.device}", "cpu": "cpu"}.get(name) or kwargs.get("device")
    for one in args[1:]:
        if isinstance(one, Tensor):
            other = MACHINE.of(one)
            wanted, dtype = "cpu" if other is None else f"cuda:{other}", one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, bool):
            flags.append(one)
        elif one is not None:
            wanted = one
    if wanted is not None and not _here(wanted):
        return func(*args, **kwargs)
    non_blocking, copied = (*flags, False, False)[:2]
    non_blocking, copied = kwargs.get("non_blocking", non_blocking), kwargs.get("copy", copied)
    cast = tensor if dtype in (None, tensor.dtype) else Tensor.to(tensor, dtype)
    here, there = MACHINE.of(tensor), _number(wanted) if wanted is not None else MACHINE.of(tensor)
    if here == there:
        return cast.clone() if copied and cast is tensor else cast
    with _elsewhere(there):
        out = torch.empty_like(cast)
    if not (torch.is_grad_enabled() and cast.requires_grad):
        return out.copy_(cast.detach(), non_blocking=non_blocking)
    raise NotImplementedError("a move that autograd follows")


@contextmanager
def _elsewhere(gpu: int | None) -> Iterator[None]:
    before, MACHINE.local.gpu = getattr(MACHINE.local, "gpu", None), (gpu,)
    try:
        yield
    finally:
        MACHINE.local.gpu = before


class _Kernels(TorchDispatchMode):
    """Books what each kernel reads and writes, and in which stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in ("aten", "prims"):
            with MACHINE.lock:
                _booked(func, args, kwargs, out)
        elif func.namespace == "c10d":
            with MACHINE.lock:
                _communicated(func._schema.name.partition("::")[2], args, out)
        return out


def _tensors(values: Any) -> list[Tensor]:
    """Those that have memory."""
    found = (one for one in tree_leaves(values) if isinstance(one, Tensor) and not isinstance(one, FakeTensor))
    return [one for one in found if one.numel() and one.device.type != "meta"]


def _booked(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    ins, outs = _tensors((args, kwargs)), _tensors(out)
    own = {_block(one) for one in ins}
    name = func._schema.name.partition("::")[2]
    wanted = getattr(MACHINE.local, "gpu", None)
    places = [MACHINE.of(one) for one in ins if one.dim() or MACHINE.of(one) is not None]
    gpu = wanted[0] if wanted else next((place for place in places if place is not None), None)
    for one in outs:
        MACHINE.allocated(one, gpu)
    if func.is_view or name in NO_KERNEL:
        return
    written = [one for one in outs if _block(one) not in own]
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info and argument.alias_info.is_write:
            written += _tensors(value)
    if name == "copy_":
        _copied(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
        return
    different = {place for place in places if place is not None}
    if len(different) > 1 and name != "_foreach_norm":
        MACHINE.order.faults.append(f"{name} has tensors of GPUs {sorted(different)}")
    stream = HOST if gpu is None else MACHINE.stream(gpu).name
    MACHINE.order.launch(stream, name, map(_range, ins), map(_range, written))
    if gpu is not None and name in READ_BY_HOST:
        MACHINE.host_waits(stream)


def _copied(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    order, ends = MACHINE.order, (MACHINE.of(source), MACHINE.of(target))
    streams = [MACHINE.stream(gpu).name for gpu in dict.fromkeys(ends) if gpu is not None]
    if not streams:
        order.launch(HOST, "copy_", [_range(source)], [_range(target)])
        return
    for stream in streams[1:]:
        order.join(streams[0], order.clock(stream))
    host = [one for one, gpu in ((source, ends[0]), (target, ends[1])) if gpu is None]
    pageable = bool(host) and _block(host[0]) not in MACHINE.pinned
    if pageable and host[0] is source:
        order.launch(HOST, "copy_", [_range(source)])
        order.launch(streams[0], "copy_", [], [_range(target)])
    else:
        order.launch(streams[0], "copy_", [_range(source)], [_range(target)])
    for stream in streams[1:]:
        order.join(stream, order.clock(streams[0]))
    if host and (pageable or not non_blocking):
        MACHINE.host_waits(streams[0])
    elif host:  # torch gives pinned memory to nobody else before such a copy has ended
        order.record(_block(host[0]), streams[0])


def _communicated(name: str, args: Any, out: Any) -> None:
    """A call of torch.distributed from the main thread."""
    group = next(ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
    works = [Work.unbox(one) for one in tree_leaves(out) if isinstance(one, torch.ScriptObject)]
    tensors = _tensors([one for one in args if not isinstance(one, torch.ScriptObject)])
    sent = tensors if name == "send" else tensors[1:] if name in ("_allgather_base_", "_reduce_scatter_base_") else ()
    _in_stream_of(group.group_name, name, tensors, [one for one in tensors if one not in set(sent)], works)


def _in_stream_of(
    group: str, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], works: Sequence[Work]
) -> None:
    gpu = next((place for place in map(MACHINE.of, reads) if place is not None), None)
    if gpu is None:
        MACHINE.order.launch(HOST, name, map(_range, reads), map(_range, writes))
        return
    stream = f"gpu {gpu}, group {group}"
    MACHINE.order.join(stream, MACHINE.order.clock(MACHINE.stream(gpu).name))
    MACHINE.order.launch(stream, name, map(_range, reads), map(_range, writes))
    MACHINE.works.update((id(work), (stream, work)) for work in works)


def _message(method: Callable[..., Work], name: str) -> Callable[..., Work]:
    """`send` and `recv` of a group in another thread than the main one: modes of several threads can crash there."""

    def called(group: ProcessGroup, tensors: Any, peer: int, tag: int) -> Work:
        if threading.current_thread() is threading.main_thread():
            return method(group, tensors, peer, tag)
        with _disable_current_modes():
            work = method(group, tensors, peer, tag)
        with MACHINE.lock:
            _in_stream_of(group.group_name, name, tensors, tensors if name == "recv" else (), [work])
        return work

    return called


def _waited(method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # gloo copies some results there
            out = method(work, *args, **kwargs)
        if found := MACHINE.works.get(id(work)):
            stream = found[0]
            gpu = int(stream.split(",")[0].removeprefix("gpu "))
            with MACHINE.lock:
                MACHINE.order.join(MACHINE.stream(gpu).name, MACHINE.order.clock(stream))
        return out

    return wait


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
        return
    before = MACHINE.stream(stream.gpu)
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


def _set_stream(stream: Stream) -> None:
    MACHINE.stream(stream.gpu)
    MACHINE.local.streams[stream.gpu] = stream


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass. `Tensor.backward` is itself a function that the mode sees, and is without it inside."""

    def watched_run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if _get_current_function_mode_stack() else _Devices():
            return run(*args, **kwargs)

    return watched_run


def _without_device(init: Callable[..., None]) -> Callable[..., None]:
    """gloo knows of no GPU."""

    def begun(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init(*args, **kwargs)

    return begun


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    MACHINE.order.record(_block(tensor), stream.name)


def _synchronize(device: Any = None) -> None:
    gpu = MACHINE.device if device is None else _number(device)
    for name in list(MACHINE.order.clocks):
        if name.split(",")[0] == f"gpu {gpu}":
            MACHINE.host_waits(name)


FAKES: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": _stream,
    "set_stream": _set_stream,
    "current_stream": _current,
    "synchronize": _synchronize,
    "current_device": lambda: MACHINE.device,
    "device_count": lambda: 8,
    "set_device": lambda device: setattr(MACHINE, "device", _number(device)),
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
}


@contextmanager
def watched() -> Iterator[None]:
    """This thread's tensors and kernels are watched."""
    with _Devices(), _Kernels():
        yield


@contextmanager
def fake_gpus() -> Iterator[StreamOrder]:
    """GPUs for this process, the ranks that it forks and their threads."""
    MACHINE.__init__()  # type: ignore[misc]
    run = threading.Thread.run

    def in_thread(thread: threading.Thread) -> None:
        with watched():
            run(thread)

    with pytest.MonkeyPatch.context() as patch:
        for name, fake in FAKES.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.autograd, "_engine_run_backward", _backward(torch.autograd._engine_run_backward))
        patch.setattr(Tensor, "record_stream", _record_stream)
        patch.setattr(process_group, "ON_GPUS", "gloo")
        patch.setattr(dist, "init_process_group", _without_device(dist.init_process_group))
        options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
        patch.setattr(dist, "ProcessGroupNCCL", options, raising=False)  # gloo takes no notice of them
        patch.setattr(threading.Thread, "run", in_thread)
        patch.setattr(Work, "wait", _waited(Work.wait))
        for method in "send", "recv":
            patch.setattr(ProcessGroup, method, _message(getattr(ProcessGroup, method), method))
        with watched():
            yield MACHINE.order
