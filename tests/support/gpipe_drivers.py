"""Both graphs that drive a gpipe pipeline, over CPU devices."""

from __future__ import annotations

from typing import Any

from engines.gpipe.cuda_pipeline import CudaPass
from engines.gpipe.cuda_streams import Streams
from engines.gpipe.gpipe_module import GPipe
from engines.gpipe.microbatch import scatter
from engines.gpipe.stage import Surroundings
from engines.gpipe.stage_layout import layout
from harness.runtime.values import Value, mark_overlaps


def run_tensors(pipe: GPipe, value: Value, chunks: int, mode: str, dependency: bool = True, portals: bool = True,
                streams: Streams | None = None, grad: bool = True) -> tuple[CudaPass, Value]:  # fmt: skip
    """The same pipeline, driven by CudaPass over CPU devices."""
    streams = streams or Streams(pipe.devices, {})
    transfers = layout([pair for stage in pipe.stages for pair in stage.layers], pipe.balance, pipe.placement, portals)
    around = Surroundings.capture(pipe.seed, 0, "cpu")
    run = CudaPass(pipe.stages, transfers, streams, around, mode, grad, dependency, pipe.ties, pipe._trained())
    pieces = scatter(value, chunks)
    for piece in pieces:
        mark_overlaps(piece)
    return run, run.run(pieces)


def on_queues(pipe: GPipe, x: Any) -> Any:
    return pipe(x)


def on_tensors(pipe: GPipe, x: Any) -> Any:
    """By the graph that drives CUDA devices."""
    return run_tensors(pipe, x, pipe.chunks, pipe.checkpoint)[1]


DRIVERS = {"queues": on_queues, "tensors": on_tensors}
