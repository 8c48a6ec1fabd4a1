"""The group `cluster`: this machine, or one that a few numbers describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from harness.config.cluster_parts import EffectiveConfig, PeakConfig
from harness.config.plain_config import composed
from harness.core.cluster import CLASSES, Cluster, Device, Link
from harness.core.problem import Problem, refuse
from harness.core.value_checks import at_least, one_of
from harness.host import devices, local_devices
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.host.slurm_job import Allocation

GB = 1e9
TERA = 1e12
NOMINAL_GB_S = {"cpu": 5.0, "cuda": 12.0}
"""Between two local devices where nothing is given or measured: a copy in main memory, PCIe 3.0 x16."""
SMALLEST, LARGEST = 1e-9, 1e15
"""Range of values that must be above 0: one byte in GB, and more than any machine has."""
LONGEST_S = 1e6
"""Largest latency or launch overhead: next to a longer one a float loses the other times."""
VALUES = ("nominal", "effective")
MOST_DEVICES = 2**16
"""Largest number of devices of a cluster: plans and schedules list them."""


@dataclass
class ClusterConfig:
    """The keys `cluster.*`. Bandwidths are for each direction, GB = 1e9 bytes."""

    name: str = "local"
    """local: the devices of this machine. Any other name is a described cluster: planned for, not run on."""
    nodes: int | None = None
    """Number of nodes; null: 1, or all nodes of the Slurm job where srun starts the ranks."""
    devices: int | None = None
    """Number of devices of each node; null: all GPUs of this machine, or one CPU device for each core (inside of a
    Slurm job for each CPU of its allocation, and for each task where srun starts the ranks)."""
    device: str = "auto"
    """With cluster=local the kind of device: auto (GPUs where there are any), cpu or cuda. Otherwise the device's
    name."""
    memory_gb: float | None = None
    """Memory of each device in GB (1e9 bytes); null: the memory of this machine's devices, shared equally among CPU
    devices."""
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    memory_bandwidth_gb_s: float | None = None
    """Bandwidth of each device's memory in GB/s; null: as measured here, not known for a described cluster."""
    efficiency: float = 1.0
    """Fraction of both peaks (FLOP/s and memory bandwidth) that large kernels reach. 1: not calibrated, so that speeds
    are upper bounds."""
    matmul_efficiency: float | None = None
    """Fraction of the peak FLOP/s that large matmuls reach; null: efficiency."""
    convolution_efficiency: float | None = None
    """Fraction of the peak FLOP/s that large convolutions reach, with kernels of more than a pixel; null: efficiency.
    Up to 2.25: Winograd's algorithm for kernels of 3 x 3 pixels needs fewer multiplications than are counted."""
    attention_efficiency: float | None = None
    """Fraction of the peak FLOP/s that attention reaches, a causal one counted whole; null: efficiency."""
    elementwise_efficiency: float | None = None
    """Fraction of the memory bandwidth that kernels without matmuls reach; null: efficiency."""
    image_efficiency: float | None = None
    """The same in convolutional nets, whose batch norms and activations have large tensors; null:
    elementwise_efficiency."""
    float32_efficiency: float | None = None
    """Fraction of the peak FLOP/s that matmuls and convolutions reach in float32 without tensor cores. If it is given,
    those of matmuls, convolutions and attention count in float16 and bfloat16 alone; null: in every format."""
    tf32_efficiency: float | None = None
    """The same with precision.tf32=true, in the place of cluster.float32_efficiency."""
    overlap: float = 1.0
    """Fraction of a collective's time that is hidden where it runs while a device computes: kernels of both compete for
    the device's cores and memory. 1: all of it."""
    collective_call_s: float = 0.0
    """Overhead of each call of a collective in seconds, in addition to the latency of its messages."""
    kernel_s: float | None = None
    """Overhead of each kernel launch in seconds; null: as measured here, 0 for a described cluster."""
    wave_elements: int | None = None
    """Elements of a matmul's output that a device computes at once (a wave). On average half a wave is wasted, so that
    small matmuls are less efficient. null: no waste."""
    float32_wave_elements: int | None = None
    """The same in float32 without tensor cores, whose tiles are smaller; null: cluster.wave_elements."""
    bandwidth_gb_s: float | None = None
    """Bandwidth in GB/s of a link between two devices of a node; null: as measured here, else 5 between CPU devices and
    12 between GPUs."""
    alpha_s: float | None = None
    """Latency of a message between two devices of a node in seconds; null: as measured here, 0 for a described
    cluster."""
    duplex: str = "full"
    """full: a link carries both directions at once at full bandwidth; half: both directions share it."""
    node_bandwidth_gb_s: float | None = None
    """Bandwidth in GB/s of a node's network port, shared by all its messages to other nodes; null: bandwidth_gb_s."""
    node_alpha_s: float | None = None
    """Latency of a message between nodes in seconds; null: alpha_s."""
    node_alone_gb_s: float | None = None
    """Bandwidth in GB/s of a node's network port for a transfer that has it alone, where that is more than what several
    share; null: node_bandwidth_gb_s."""
    task_s: float = 0.0
    """Seconds that each task takes beyond its kernels, the host between two tasks: a forward pass, a backward pass or
    each of its halves, a recomputation."""
    host_bandwidth_gb_s: float | None = None
    """Bandwidth in GB/s between a device and its host's memory; null: as measured here, bandwidth_gb_s for a described
    cluster."""
    host_alpha_s: float | None = None
    """Latency of a copy from or to the host in seconds; null: as measured here, alpha_s for a described cluster."""
    slow_device: list[int] = field(default_factory=list)
    """Numbers of devices that are slower than the others, in a simulation: [3], counted from 0 over all nodes."""
    slow_factor: float = 1.5
    """How many times as long tasks of cluster.slow_device take."""
    blocking_messages: bool = False
    """true: a message also occupies compute of both devices; false: only the link."""
    cores: float | None = None
    """Number of devices of a node that can compute at full speed at once; 0: all; null: as measured here, else 0."""
    values: str = "nominal"
    """nominal: the keys as they are (data sheets). effective: cluster.effective.* replaces them where it is given. A
    key on the command line wins over both: cluster.bandwidth_gb_s=6."""
    effective: EffectiveConfig = field(default_factory=EffectiveConfig)


SLOWEST = 1000.0
"""Largest factor of a straggler."""
WINOGRAD = 2.25
"""Multiplications of a convolution with 3 x 3 pixels, for each that Winograd's algorithm F(2 x 2, 3 x 3) needs (Lavin
and Gray, arXiv 1509.09308)."""


def build(config: ClusterConfig, machine: Machine | None = None, job: Allocation | None = None) -> Cluster:
    """Build the cluster that `config` describes. Raises `CannotRun` with all problems.

    `job` is the Slurm job, or the nodes of torchrun, on which the ranks of cluster=local will be, if they are not all
    here (`harness.launch.rank_starter`).

    For cluster=local, `machine` (see `harness.host.machine`) is what was measured here; it fills in what `config`
    leaves out. Without it links are nominal, and peaks are not known.
    """
    wrong = _impossible(config)
    found = devices.detect(config.device) if is_local(config) and not wrong else None
    if found:
        wrong += local_devices.problems(config, found, job)
    refuse(wrong, f"cluster={config.name}")
    chosen = _chosen(config)
    return _local(chosen, found, machine or _nominal(found), job) if found else _described(chosen)


def from_group(group: DictConfig) -> ClusterConfig:
    """Convert the composed group `cluster`, or one from a run's file, to plain values."""
    found: Any = OmegaConf.to_object(composed(group))
    return found if isinstance(found, ClusterConfig) else ClusterConfig(**found)


def is_local(config: ClusterConfig) -> bool:
    """Whether the cluster is this machine, so that it can be run on and not only planned for."""
    return config.name == "local"


def _chosen(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with the effective values in place of the nominal ones, if these are asked for."""
    effective = _given(config.effective) if config.values == "effective" else {}
    return dataclasses.replace(config, **cast(dict[str, Any], effective))


def _given(part: object) -> dict[str, float]:
    """Return the keys of a part of the configuration (its dataclass, a mapping) that are not null."""
    keys = part if isinstance(part, Mapping) else vars(part)
    return {str(key): value for key, value in keys.items() if value is not None}


def _nominal(found: DetectedDevices) -> Machine:
    """Return default values for a machine that was not measured: CPU devices share its cores, peaks are not known."""
    link = Link(0.0, 1 / (NOMINAL_GB_S[found.kind] * GB))
    return Machine(Device(found.name, found.memory_bytes), link, cores=found.count if found.kind == "cpu" else 0)


def _local(config: ClusterConfig, found: DetectedDevices, machine: Machine, job: Allocation | None) -> Cluster:
    count, nodes = config.devices or local_devices.count(found, job), config.nodes or (job.nodes if job else 1)
    share = found.memory_bytes // count if found.kind == "cpu" else machine.device.memory_bytes
    intra = _link(config, "", machine.link)
    host = _link(config, "host_", machine.host_link or intra)
    here = machine.device
    known = Device(found.name, share, here.peak_flops, here.memory_bandwidth, kernel_s=here.kernel_s)
    device = _device(config, known)
    cores = machine.cores if config.cores is None else config.cores
    given = config.alpha_s is not None or config.bandwidth_gb_s is not None
    return Cluster(
        _name(config),
        nodes,
        count,
        device,
        intra,
        _link(config, "node_", intra),
        host,
        config.blocking_messages,
        cores,
        _process_cores(machine) if config.cores is None else 0.0,
        () if given else machine.calls,
        config.overlap,
        _slow(config),
        config.task_s,
        (config.node_alone_gb_s or 0.0) * GB,
        config.collective_call_s,
    )


def _described(config: ClusterConfig) -> Cluster:
    assert config.devices
    intra = _link(config, "", Link())
    device = _device(config, Device(config.name if config.device == "auto" else config.device))
    return Cluster(
        _name(config),
        config.nodes or 1,
        config.devices,
        device,
        intra,
        _link(config, "node_", intra),
        _link(config, "host_", intra),
        config.blocking_messages,
        config.cores or 0.0,
        overlap=config.overlap,
        slow=_slow(config),
        task_s=config.task_s,
        alone_bandwidth=(config.node_alone_gb_s or 0.0) * GB,
        collective_call_s=config.collective_call_s,
    )


def _name(config: ClusterConfig) -> str:
    return f"{config.name} (effective)" if config.values == "effective" else config.name


def _process_cores(machine: Machine) -> float:
    """Those of threads where processes are not measured yet; 0 where nothing is."""
    return machine.process_cores or (machine.cores if machine.device.peak_flops else 0.0)


def _device(config: ClusterConfig, known: Device) -> Device:
    """Return `known` with all values that the configuration gives."""
    peaks = {dtype: tflops * TERA for dtype, tflops in _given(config.peak_tflops).items() if dtype != "tf32"}
    bandwidth = config.memory_bandwidth_gb_s
    return Device(
        known.name,
        round(config.memory_gb * GB) if config.memory_gb else known.memory_bytes,
        known.peak_flops | peaks,
        bandwidth * GB if bandwidth else known.memory_bandwidth,
        config.efficiency,
        known.kernel_s if config.kernel_s is None else config.kernel_s,
        config.wave_elements or known.wave_elements,
        {name: share for name in CLASSES if (share := getattr(config, f"{name}_efficiency")) is not None},
        config.float32_wave_elements or 0,
    )


def _link(config: ClusterConfig, prefix: str, known: Link) -> Link:
    """Return `known` with the values of `prefix`bandwidth_gb_s and `prefix`alpha_s, if they are given."""
    bandwidth, alpha = getattr(config, f"{prefix}bandwidth_gb_s"), getattr(config, f"{prefix}alpha_s")
    beta = 1 / (bandwidth * GB) if bandwidth else known.beta_s_per_byte
    return Link(known.alpha_s if alpha is None else alpha, beta, "half" if config.duplex == "half" else "full")


def _impossible(config: ClusterConfig) -> list[Problem]:
    """Return the problems with values that no cluster can have."""
    at_least_1 = ("nodes", "devices", "wave_elements", "float32_wave_elements")
    wrong = [problem for key in at_least_1 for problem in at_least(f"cluster.{key}", getattr(config, key), 1)]
    nodes, devices = config.nodes or 1, config.devices or 1
    if nodes * devices > MOST_DEVICES:
        key, value = ("nodes", nodes) if nodes > devices else ("devices", devices)
        wrong.append(_problem(f"at most {MOST_DEVICES}, over all nodes", key, value, 1))
    wrong += [*_bad_numbers(config), *_unknown(config)]
    wrong += [
        _problem(f"above 0 (from {SMALLEST:g}) and at most {_most(key):g}, a share", key, share, 1)
        for key, share in (*_given(config).items(), *_only_effective(config))
        if key.endswith("efficiency") and not SMALLEST <= share <= _most(key)
    ]
    wrong += [
        _problem("at least 0 and at most 1, a share", key, share, 1)
        for key, share in (*_given(config).items(), *_only_effective(config))
        if key.endswith("overlap") and not 0 <= share <= 1
    ]
    if not 1 <= config.slow_factor <= SLOWEST:
        wrong.append(_problem(f"from 1 to {SLOWEST:g}", "slow_factor", config.slow_factor, 1.5))
    if not is_local(config) and not _unknown(config):
        wrong += _no_such_device(config)
        chosen = _chosen(config)
        for key, example in (("devices", 8), ("memory_gb", 16), ("bandwidth_gb_s", 12)):
            if getattr(chosen, key) is None:
                wrong.append(_problem("given, only cluster=local is measured", key, None, example))
    return wrong


def _most(key: str) -> float:
    """The largest efficiency."""
    return WINOGRAD if key.endswith("convolution_efficiency") else 1


def _no_such_device(config: ClusterConfig) -> list[Problem]:
    count = (config.nodes or 1) * (config.devices or 1)
    if all(0 <= number < count for number in config.slow_device) or not config.devices:
        return []
    message = f"names devices that are not among 0 to {count - 1}"
    return [Problem("cluster.slow_device", list(config.slow_device), message, ({"cluster.slow_device": [count - 1]},))]


def _slow(config: ClusterConfig) -> tuple[tuple[int, float], ...]:
    return tuple((number, config.slow_factor) for number in sorted(set(config.slow_device)))


def _bad_numbers(config: ClusterConfig) -> Iterator[Problem]:
    """Yield problems: bandwidths, peaks and memory that are not above 0, negative times and counts, infinite
    numbers."""
    numbers = {key: value for key, value in _given(config).items() if isinstance(value, int | float)}
    numbers |= {f"peak_tflops.{key}": value for key, value in _given(config.peak_tflops).items()}
    numbers |= dict(_only_effective(config))
    for key, value in numbers.items():
        if key.endswith(("_gb", "_gb_s")) or key.startswith("peak_tflops."):
            if not SMALLEST <= value <= LARGEST:
                between = f"above 0 (from {SMALLEST:g} to {LARGEST:g})"
                yield _problem(between, key, value, 16 if key == "memory_gb" else 12)
        elif key.endswith(("_s", "cores")) and not 0 <= value <= LONGEST_S:
            yield _problem(f"at least 0 and at most {LONGEST_S:g}", key, value, 0)


def _only_effective(config: ClusterConfig) -> Iterator[tuple[str, float]]:
    """Yield the effective values that differ from the nominal ones, so that a bad number is reported once."""
    for key, value in _given(config.effective).items():
        if str(value) != str(getattr(config, key, None)):
            yield f"effective.{key}", value


def _unknown(config: ClusterConfig) -> list[Problem]:
    """Return the problems with unknown words in values and in keys."""
    wrong = one_of("cluster.duplex", config.duplex, ("full", "half")) + one_of("cluster.values", config.values, VALUES)
    if is_local(config):
        wrong += one_of("cluster.device", config.device, ("auto", "cpu", "cuda"))
    for group, kind in (("peak_tflops", PeakConfig), ("effective", EffectiveConfig)):
        names = [key.name for key in dataclasses.fields(kind)]
        for key in _given(getattr(config, group)).keys() - set(names):
            wrong.append(Problem(f"cluster.{group}.{key}", None, f"is not one of {', '.join(names)}"))
    if config.values == "effective" and not _given(config.effective):
        message = f"cluster={config.name} has only nominal values"
        wrong.append(Problem("cluster.values", config.values, message, ({"cluster.values": "nominal"},)))
    return wrong


def _problem(wanted: str, key: str, value: object, fix: object) -> Problem:
    return Problem(f"cluster.{key}", value, f"must be {wanted}", ({f"cluster.{key}": fix},))
