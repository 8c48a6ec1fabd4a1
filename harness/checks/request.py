"""Check a request before the model is profiled: all problems at once, in the user's keys, each with its fixes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from omegaconf import DictConfig

from harness.checks import formats
from harness.checks.mesh import DEGREES, given_balance, given_degree, has
from harness.config import registry
from harness.config.schema import PRECISIONS
from harness.core import divisors
from harness.core.cluster import Cluster
from harness.core.plan import Mesh
from harness.core.problem import Fix, Problem, after_fixes, typed
from harness.host import devices, local_devices
from harness.interfaces import Capabilities


def request(config: DictConfig, can: Capabilities, cluster: Cluster | None) -> list[Problem]:
    """Return the problems of the request itself. `cluster` is None if it has problems of its own.

    Where the number of replicas is wrong, micro-batches are judged by the number that fixes it.
    """
    mesh = [*_degrees(config, can), *(too_many_devices(config, _wanted(config, can), cluster) if cluster else [])]
    return [
        *mesh,
        *_micro_batches(config, after_fixes(mesh, "mesh.data", given_degree(config, "data") or 1)),
        *_tensor_parallel(config, can),
        *on_any_mesh(config, can),
    ]


def on_any_mesh(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Return the problems that a request has with any mesh and micro-batches, the last ones of `request`."""
    return [
        *_costs(config),
        *_place(config),
        *_dtype(config, can),
        *_order(config, can),
        *_compiled(config, can),
        *_scaled(config, can),
        *_cast(config),
        *_sharded(config, can),
        *_graphed(config, can),
        *_optimizer(config, can),
    ]


def notes(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Return warnings about a request that is executed all the same.

    Engines scale the losses of `precision.dtype=float16` alone; under autocast nothing does, whose backward pass makes
    gradients of activations in float16, too (Micikevicius et al., "Mixed Precision Training", section 3.2).
    """
    precision = config.precision
    if precision.autocast != "float16" or precision.dtype == "float16" or precision.grad_scaler:
        return []
    message = "makes gradients below 6e-8 zero, and those above 65504 infinite: under autocast no loss is scaled"
    fixes: list[Fix] = [{"precision.autocast": "bfloat16"}] if formats.computes(config, "bfloat16") else []
    fixes += [{"precision.grad_scaler": True}] if can.grad_scaler else []
    return [Problem("precision.autocast", "float16", message, tuple(fixes or [formats.float32(config)]))]


def _order(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Weights in an order that the engine would undo, or does not take."""
    key = "precision.channels_last"
    if not config.precision.channels_last or can.channels_last:
        return []
    message = f"is not for engine={config.engine.name}, which puts weights, or parts of them, one after the other"
    return [Problem(key, True, message, ({key: False},))]


def _compiled(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Compiled layers that the engine cannot run."""
    if not config.precision.compile or can.compiled:
        return []
    schedule = config.engine.get("schedule")
    own = f" with engine.schedule={schedule}" if config.engine.name == "pipeline" else ""
    message = f"is not for engine={config.engine.name}{own}, which trains layers as they are"
    fixes: list[Fix] = [{"precision.compile": False}]
    return [Problem("precision.compile", True, message, (*fixes, *([{"engine.schedule": "1f1b"}] if own else [])))]


def _scaled(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Losses that an engine does not scale, or that need no scale."""
    key, precision = "precision.grad_scaler", config.precision
    if not precision.grad_scaler:
        return []
    if not can.grad_scaler:
        return [
            Problem(key, True, f"is not for engine={config.engine.name}, whose losses are as they are", ({key: False},))
        ]
    if precision.autocast == "float16" and precision.dtype in ("float32", "float64"):
        return []
    message = "has no effect on gradients that are not made in float16 under autocast"
    right: Fix = {"precision.autocast": "float16", "precision.dtype": "float32"}
    return [Problem(key, True, message, ({key: False}, right))]


def _cast(config: DictConfig) -> list[Problem]:
    """A way of mixing formats, of a run that has one format."""
    key, precision = "engine.mixed_precision", config.precision
    if config.engine.get("mixed_precision") != "policy" or precision.autocast not in (None, precision.dtype):
        return []
    message = f"has no effect where all is in {precision.dtype}: it needs precision.autocast, another format"
    mixed: list[Fix] = [{"precision": "mixed"}] if formats.computes(config, "bfloat16") else []
    return [Problem(key, "policy", message, ({key: "autocast"}, *mixed))]


def _sharded(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Checkpoints in shards of an engine that has no parts of the model in several processes."""
    key = "launch.sharded_checkpoints"
    if not config.launch.sharded_checkpoints or can.sharded_checkpoints:
        return []
    holder = "each of whose processes has the whole model" if can.multi_process else "which is one process"
    message = f"is not for engine={config.engine.name}, {holder}"
    return [Problem(key, True, message, ({key: False},))]


def _graphed(config: DictConfig, can: Capabilities) -> list[Problem]:
    """CUDA graphs of an engine that has none, of layers that do more than to repeat kernels, or without a GPU."""
    key, checkpoint = "precision.cuda_graphs", config.engine.get("checkpoint", "never")
    if not config.precision.cuda_graphs:
        return []
    more: list[Fix] = []
    if not can.cuda_graphs:
        message = f"is not for engine={config.engine.name}, which starts each kernel by itself"
    elif here(config) == "cpu":
        message = "is for GPUs, and this machine's devices are CPU cores"
    elif checkpoint != "never":
        message, more = "keeps all activations in its graphs, and recomputes none", [{"engine.checkpoint": "never"}]
    elif config.precision.compile:
        message, more = "is not for layers that torch.compile has compiled", [{"precision.compile": False}]
    else:
        return []
    return [Problem(key, True, message, ({key: False}, *more))]


def profiling(config: DictConfig) -> list[Problem]:
    """Return the problems of a request for a profile: its micro-batches, and the source of its times."""
    return [*_micro_batches(config, given_degree(config, "data") or 1), *_costs(config)]


def _degrees(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Degrees that the engine does not have."""
    parts = {"data": "replicas", "pipeline": "pipeline stages", "tensor": "tensor shards"}
    found = []
    for name in ("data", "pipeline", "tensor"):
        degree = given_degree(config, name) or 1
        if degree == 1 or has(config, can, name) or (name == "pipeline" and given_balance(config)):
            continue  # stages that the user gives are checked when the configuration is composed
        message = f"{_engine(config, can, name)} has no {parts[name]}"
        fix: Fix = {f"mesh.{name}": 1}
        if name == "pipeline" and "stages" in config.engine:  # all of them on one device
            message, fix = f"{message} on several devices", {**fix, "engine.stages": degree}
        found.append(Problem(f"mesh.{name}", degree, message, _or_instead(fix, can, name)))
    return found


def _engine(config: DictConfig, can: Capabilities, field: str) -> str:
    """The engine, with the setting that limits this capability."""
    setting = can.disabled_by.get(field)
    return f"engine={config.engine.name}" + (f" with {typed(setting.given)}" if setting else "")


def _or_instead(fix: Fix, can: Capabilities, field: str) -> tuple[Fix, ...]:
    """A fix, or another setting of the engine that leaves it this capability."""
    setting = can.disabled_by.get(field)
    return (fix, setting.instead) if setting else (fix,)


def _wanted(config: DictConfig, can: Capabilities) -> Mesh:
    """The degrees that are given and that the engine has."""
    return Mesh(**{name: given_degree(config, name) or 1 for name in DEGREES if has(config, can, name)})


def too_many_devices(config: DictConfig, mesh: Mesh, cluster: Cluster) -> list[Problem]:
    """More devices than the cluster has."""
    size = mesh.size
    if size <= cluster.devices:
        return []
    if 1 < mesh.pipeline == len(given_balance(config)) and size <= cluster.devices * mesh.pipeline:
        return [_too_many_stages(config, size // mesh.pipeline, cluster)]
    degrees = {f"mesh.{name}": n for name in ("data", "pipeline", "tensor") if (n := getattr(mesh, name)) > 1}
    smaller: Fix = _smaller(degrees, cluster.devices)
    key, *_ = smaller
    others = "".join(f"x {name} {degree} " for name, degree in degrees.items() if name != key)
    message = f"{others}needs {size} devices, the cluster has {cluster.devices}{local_devices.origin(config.cluster)}"
    more, hint = _more_devices(config, mesh, smaller.get("mesh.data", mesh.data), cluster.nodes)
    return [Problem(key, degrees[key], message, (smaller, *more), hint)]


def _smaller(degrees: Mapping[str, int], count: int) -> dict[str, int]:
    """The degrees that have to be smaller for so many devices, the largest first, each as large as it can be."""
    kept, found = dict(degrees), {}
    for name in sorted(degrees, key=lambda name: -degrees[name]):
        if (size := math.prod(kept.values())) > count:
            kept[name] = found[name] = max(1, count * kept[name] // size)
    return found


def _more_devices(config: DictConfig, mesh: Mesh, data: int, nodes: int) -> tuple[list[Fix], str]:
    """A fix with more devices, where they are threads of this machine, or a hint, where they are tasks of a job on
    `nodes`: with a batch for all replicas, where the smaller mesh has only `data` of them. Neither where the batch is
    wrong for those, too."""
    if here(config) != "cpu" or (data < mesh.data and _micro_batches(config, data)):
        return [], ""
    batch = _batch_for(config, mesh.data) if data < mesh.data else {}
    if local_devices.origin(config.cluster):
        return [], " ".join(filter(None, [f"sbatch --ntasks-per-node={-(-mesh.size // nodes)}", typed(batch)]))
    return [{"cluster.devices": mesh.size} | batch], ""


def here(config: DictConfig) -> devices.Kind | None:
    """Return the kind of the devices if the cluster is this machine, else None."""
    return devices.detect(config.cluster.device).kind if config.cluster.name == "local" else None


def _too_many_stages(config: DictConfig, each: int, cluster: Cluster) -> Problem:
    """Return the problem of planner=given with more stages than devices; a stage needs `each` devices."""
    balance = given_balance(config)
    room = cluster.devices // each
    stages = f"has {len(balance)} stages{f' of {each} devices' if each > 1 else ''}"
    message = f"{stages}, the cluster has {cluster.devices} device{'s' if cluster.devices > 1 else ''}"
    fixes: list[Fix] = [] if room > 1 else [{"planner.balance": [sum(balance)]}]
    fixes += [] if here(config) == "cuda" else [{"cluster.devices": -(-len(balance) * each // cluster.nodes)}]
    hint = f"{room} numbers that add up to the model's layers" if room > 1 else ""
    return Problem("planner.balance", balance, message, tuple(fixes), hint)


def _micro_batches(config: DictConfig, data: int) -> list[Problem]:
    """Check that all micro-batches of the `data` replicas have the same number of samples.

    With a stored profile, `harness.checks.profile_match` checks them.
    """
    size, count = config.batch.size, config.batch.micro_batches
    if min(size, data, count) < 1 or config.profile:
        return []  # `harness.checks.configuration` reports values out of range
    if size % data:
        return [Problem("batch.size", size, f"is not divisible by mesh.data {data}", (_batch_for(config, data),))]
    if (size // data) % count == 0:
        return []
    whole = f"batch.size {size}" if data == 1 else f"batch.size {size} / mesh.data {data}"
    fixes = tuple({"batch.micro_batches": number} for number in divisors.nearest_divisors(size // data, count))
    return [Problem("batch.micro_batches", count, f"does not divide {whole}", fixes)]


def _batch_for(config: DictConfig, data: int) -> Fix:
    """The fix with the nearest divisible batch size; an empty one if the size is divisible or a profile sets it."""
    size, each = config.batch.size, max(1, data * config.batch.micro_batches)
    nearest = max(1, round(size / each)) * each
    return {} if nearest == size or config.profile else {"batch.size": nearest}


def _place(config: DictConfig) -> list[Problem]:
    if config.mode == "run" and config.cluster.name != "local":
        fixes: tuple[Fix, ...] = ({"mode": "simulate"}, {"cluster": "local"})
        return [Problem("cluster", config.cluster.name, "is only described, runs need cluster=local", fixes)]
    if config.mode in ("run", "race") and config.cluster.slow_device:
        fixes = ({"mode": "simulate"}, {"cluster.slow_device": []})
        shown = list(config.cluster.slow_device)
        return [Problem("cluster.slow_device", shown, "makes no device of this machine slow: it is simulated", fixes)]
    return []


def _tensor_parallel(config: DictConfig, can: Capabilities) -> list[Problem]:
    """A tensor-parallel planner needs an engine with tensor parallelism; some of its options are for mode=plan only."""
    planner = config.planner.name
    if not registry.splits_matmuls(planner):
        return []
    if not has(config, can, "tensor"):
        message = f"splits matmuls, {_engine(config, can, 'tensor')} has no tensor parallelism"
        return [Problem("planner", planner, message, ({"planner": "balance"}, {"engine": "sbp"}))]
    if config.mode != "run":
        return []
    message = "is a cost model, no engine runs it"
    return [
        Problem(f"planner.{key}", value, message, ({f"planner.{key}": runnable}, {"mode": "plan"}))
        for key, value, runnable in (("paths", "paper", "mixed"), ("splits", "any", "even"), ("padded", True, False))
        if config.planner.get(key) == value
    ]


def _costs(config: DictConfig) -> list[Problem]:
    """Scaled times are those of another device: of the profile's, or of this machine for a described cluster."""
    if config.costs == "scaled" and config.cluster.name == "local" and not config.profile:
        message = "needs a profile of another device, this machine is measured as it is"
        return [Problem("costs", config.costs, message, ({"costs": "measured"},), "profile=FILE")]
    return []


def _dtype(config: DictConfig, can: Capabilities) -> list[Problem]:
    dtype = config.precision.dtype
    if dtype in can.dtypes:
        return []
    message = f"{_engine(config, can, 'dtypes')} takes {', '.join(can.dtypes)}"
    key, value, fix = "precision.dtype", dtype, can.dtypes[0]
    if dtype in PRECISIONS and config.precision.get("name") == PRECISIONS[dtype]:  # the user chose all of it
        key, value, fix = "precision", PRECISIONS[dtype], PRECISIONS[fix]
    fixes = _or_instead({key: fix}, can, "dtypes")
    if dtype == "float16":
        half = tuple(formats.mixed(config, can))
        fixes = half + fixes if formats.is_faster(config) else fixes + half
    return [Problem(key, value, message, fixes)]


def _optimizer(config: DictConfig, can: Capabilities) -> list[Problem]:
    name = config.optimizer.name
    if name in can.optimizers:
        return _fused(config, can) if config.optimizer.fused and name not in can.fused else []
    message = f"{_engine(config, can, 'optimizers')} takes {', '.join(can.optimizers)}"
    near = "adamw" if "adamw" in can.optimizers and name != "sgd" else can.optimizers[0]
    fixes = _or_instead({"optimizer.name": near}, can, "optimizers")
    return [Problem("optimizer.name", name, message, fixes)]


def _fused(config: DictConfig, can: Capabilities) -> list[Problem]:
    """A fused kernel that the engine's optimizer does not have."""
    message = f"engine={config.engine.name} has no fused kernel for optimizer.name={config.optimizer.name}"
    return [Problem("optimizer.fused", True, message, ({"optimizer.fused": False},))]
