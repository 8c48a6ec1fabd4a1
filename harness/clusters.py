"""The group `cluster`: the machine at hand, or one that is described in a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness import devices
from harness.cluster import Cluster, Device, Link
from harness.devices import Found
from harness.problem import CannotRun, Problem

GB = 1e9
NOMINAL_GB_S = {"cpu": 5.0, "cuda": 12.0}
"""Between two local devices where nothing is given: a copy in main memory, PCIe 3.0 x16."""


@dataclass
class ClusterConfig:
    """The keys `cluster.*`."""

    name: str = "local"
    """local: the devices of this machine. Any other name is a described cluster: planned for, not run on."""
    nodes: int = 1
    """Machines of the cluster."""
    devices: int | None = None
    """Devices of each node; null: all GPUs, or one CPU device for each core, that are found here."""
    device: str = "auto"
    """auto (GPUs where there are any), cpu or cuda; only for cluster=local."""
    memory_gb: float | None = None
    """Memory of each device in GB (1e9 bytes); null: what is found here, shared equally among CPU devices."""
    bandwidth_gb_s: float | None = None
    """Bandwidth of a link in each direction, in GB/s; null: nominal, 5 between CPU devices and 12 between GPUs."""
    alpha_s: float = 0.0
    """Latency of one message in seconds."""
    duplex: str = "full"
    """full: both directions of a link at once; half: they share it."""


def build(config: ClusterConfig) -> Cluster:
    """The cluster that `config` describes. Raises `CannotRun` with everything that is wrong with it."""
    wrong = _impossible(config)
    found = devices.detect(config.device) if is_local(config) and not wrong else None
    if found:
        wrong += _not_here(config, found)
    if wrong:
        raise CannotRun(wrong, f"cluster={config.name}")
    return _local(config, found) if found else _described(config)


def is_local(config: ClusterConfig) -> bool:
    """Whether the cluster is this machine, so that it can be run on and not only planned for."""
    return config.name == "local"


def _local(config: ClusterConfig, found: Found) -> Cluster:
    count = config.devices or found.count
    share = found.memory_bytes // count if found.kind == "cpu" else found.memory_bytes
    device = Device(found.name, round(config.memory_gb * GB) if config.memory_gb else share)
    link = _link(config, config.bandwidth_gb_s or NOMINAL_GB_S[found.kind])
    return Cluster(config.name, 1, count, device, intra=link, node_port=link, host_link=link)


def _described(config: ClusterConfig) -> Cluster:
    assert config.devices and config.memory_gb and config.bandwidth_gb_s
    device = Device(config.name, round(config.memory_gb * GB))
    link = _link(config, config.bandwidth_gb_s)
    return Cluster(config.name, config.nodes, config.devices, device, intra=link, node_port=link, host_link=link)


def _link(config: ClusterConfig, bandwidth_gb_s: float) -> Link:
    return Link(config.alpha_s, 1 / (bandwidth_gb_s * GB), "half" if config.duplex == "half" else "full")


def _impossible(config: ClusterConfig) -> list[Problem]:
    wrong = [
        _problem("at least 1", key, value, 1)
        for key, value in (("nodes", config.nodes), ("devices", config.devices))
        if value is not None and value < 1
    ]
    for key, value, example in (("memory_gb", config.memory_gb, 16), ("bandwidth_gb_s", config.bandwidth_gb_s, 12)):
        if value is not None and not (math.isfinite(value) and value > 0):
            wrong.append(_problem("above 0", key, value, example))
    if not (math.isfinite(config.alpha_s) and config.alpha_s >= 0):
        wrong.append(_problem("at least 0", "alpha_s", config.alpha_s, 0))
    if config.device not in ("auto", "cpu", "cuda"):
        wrong.append(_problem("auto, cpu or cuda", "device", config.device, "auto"))
    if config.duplex not in ("full", "half"):
        wrong.append(_problem("full or half", "duplex", config.duplex, "full"))
    for key, example in (("devices", 8), ("memory_gb", 16), ("bandwidth_gb_s", 12)):
        if getattr(config, key) is None and not is_local(config):
            wrong.append(_problem("given, only cluster=local is looked at", key, "null", example))
    return wrong


def _problem(wanted: str, key: str, value: object, mend: object) -> Problem:
    return Problem(f"cluster.{key} {value}", f"must be {wanted}", f"cluster.{key}={mend}")


def _not_here(config: ClusterConfig, found: Found) -> list[Problem]:
    """What is asked of this machine that it lacks. CPU devices are threads: more of them than cores is only slow."""
    wrong = []
    if config.nodes != 1:
        key = f"cluster.nodes {config.nodes}"
        wrong.append(Problem(key, "cluster=local is this machine, 1 node", "cluster.nodes=1"))
    if found.kind == "cuda" and found.count < (config.devices or 1):
        key = f"cluster.devices {config.devices}" if config.devices else f"cluster.device {config.device}"
        mend = f"cluster.devices={found.count}" if found.count else "cluster.device=cpu"
        wrong.append(Problem(key, f"needs {config.devices or 1} GPUs that torch can use, {found.count} found", mend))
    return wrong
