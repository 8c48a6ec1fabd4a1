"""A calibration as a cluster of its own: a file for conf/cluster, or for another folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness.config.cluster_config import GB, TERA
from harness.core import units
from harness.core.cluster import Cluster
from harness.measure.alpha_beta_fit import Fit, middle
from harness.measure.calibration_result import Calibration

NAME = "calibrated"
FILE = Path("cluster") / f"{NAME}.yaml"
COLUMN = 36
"""Column at which comments begin."""
HERE = "measured here, by harness/measure/benchmark_machine.py"
Line = tuple[str, str | None, str]
"""A key, its value (None: left out), where that is from."""


def text(found: Calibration, cluster: Cluster, config: DictConfig, folder: Path) -> str:
    """The file: links as fitted, all else as `cluster` has it, which is this machine with what `config` gives.

    `folder` will contain the file's folder.
    """
    body = [_shown(key, value, source) for key, value, source in _lines(found, cluster, config) if value]
    return "\n".join([*_head(found, cluster, folder), "defaults: [_cluster, _self_]", "", *body, ""])


def command(folder: Path) -> str:
    """Return a command that uses the cluster file."""
    return f"python run.py --config-dir {folder} mode=simulate cluster={NAME}"


def speed(fit: Fit) -> str:
    """The bandwidth of a fit."""
    return f"{1 / fit.beta_s_per_byte / GB:.4g} GB/s" if fit.beta_s_per_byte else "unlimited"


def among(numbers: Sequence[int]) -> str:
    """2, 3 and 4."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _head(found: Calibration, cluster: Cluster, folder: Path) -> Iterator[str]:
    """Yield the comments at the head of the file: its origin, a command, and the quality of the fits."""
    sizes = [t.bytes for t in found.timings]
    day = datetime.now().astimezone().strftime("%Y-%m-%d")
    yield f"# {cluster.device.name}, {cluster.devices} devices, links calibrated by mode=calibrate on {day}."
    yield f"#   {command(folder)}"
    yield "# In conf/cluster it needs no --config-dir; give it a name of its own there, and the same in the key `name`."
    yield "#"
    yield f"# Links: medians of {found.rounds} rounds of {', '.join(found.alone)}"
    yield f"# ({found.backend}, {among(found.groups)} ranks, {units.size(min(sizes))} to {units.size(max(sizes))}),"
    yield "# fitted by least squares to Table 2 of the AutoDDL paper, alpha and beta for all collectives:"
    for fit in found.fits:
        r2 = f"R^2 {fit.r2:.3f} (large messages {fit.r2_of(found.large):.3f})"
        off = f"{fit.factor(middle(found.timings)):.2f} times off in the middle of the sizes"
        yield f"#   {fit.weights:<9} alpha {units.seconds(fit.alpha_s)}, {speed(fit)}, {r2}, {off}"
    yield f"# Below stands the {found.chosen.weights} fit, which is better there. Each collective alone would have:"
    for name, fit in found.alone.items():
        yield f"#   {name:<15} alpha {units.seconds(fit.alpha_s)}, {speed(fit)}"


def _lines(found: Calibration, cluster: Cluster, config: DictConfig) -> Iterator[Line]:
    device, host, given = cluster.device, cluster.host_link, config.cluster
    float32 = "tf32" if config.precision.tf32 else "float32"  # what was measured as float32

    def source(key: str, otherwise: str = HERE) -> str:
        return otherwise if given[key] is None else f"as typed: cluster.{key}"

    memory = "free at that time, shared equally" if found.backend == "gloo" else "what the driver reports"
    yield "name", NAME, ""
    yield "device", json.dumps(device.name, ensure_ascii=False), "found here"
    yield "devices", str(cluster.devices), source("devices", "found here")
    yield "memory_gb", _number(device.memory_bytes / GB), source("memory_gb", memory)
    yield from _peaks(
        {float32 if name == "float32" else name: peak for name, peak in device.peak_flops.items()}, given.peak_tflops
    )
    yield "memory_bandwidth_gb_s", _above_0(device.memory_bandwidth / GB), source("memory_bandwidth_gb_s")
    yield "efficiency", _number(device.efficiency), "as typed" if device.efficiency != 1 else "not calibrated"
    yield "kernel_s", _number(device.kernel_s), source("kernel_s")
    yield "bandwidth_gb_s", _number(1 / found.chosen.beta_s_per_byte / GB), "1 / beta of the fit"
    yield "alpha_s", _number(found.chosen.alpha_s), "alpha of the fit"
    yield "duplex", cluster.intra.duplex, "Table 2's rings send and receive at once"
    yield "host_bandwidth_gb_s", _above_0(1 / GB / (host.beta_s_per_byte or 1e99)), source("host_bandwidth_gb_s")
    yield "host_alpha_s", _number(host.alpha_s), source("host_alpha_s")
    yield "cores", _above_0(cluster.cores), source("cores")


def _peaks(peaks: dict[str, float], given: Any) -> Iterator[Line]:
    if peaks:
        yield "peak_tflops", " ", ""
    for dtype, flops in peaks.items():
        key = f"peak_tflops.{dtype}"
        yield f"  {dtype}", _number(flops / TERA), HERE if given.get(dtype) is None else f"as typed: cluster.{key}"


def _number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}"


def _above_0(value: float) -> str | None:
    """None for what is not known."""
    return _number(value) if value > 0 else None


def _shown(key: str, value: str, source: str) -> str:
    left = f"{key}: {value}".rstrip()
    return f"{left:<{COLUMN}} # {source}" if source else left
