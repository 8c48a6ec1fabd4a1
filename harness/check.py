"""What keeps a run from starting: every problem at once, in the user's own keys, each with its mend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from harness import at_hand, devices, display, divisors, mends, registry
from harness.cluster import Cluster
from harness.interfaces import Capabilities
from harness.memory import MemoryModel
from harness.mesh import Mesh
from harness.plan import Plan
from harness.problem import Problem
from harness.profile import ModelProfile

DEGREES = ("tensor", "pipeline", "data")
"""The first of these that an engine can do takes the devices that the given degrees leave."""


def request(config: DictConfig, can: Capabilities, cluster: Cluster | None) -> list[Problem]:
    """What is wrong with the request itself, before anything is known of the model. `cluster` None: is wrong itself.

    Where the number of replicas is wrong, micro-batches are judged by what mends it.
    """
    mesh = [*_degrees(config, can), *(_devices(config, _wanted(config, can), cluster) if cluster else [])]
    return [
        *mesh,
        *_micro_batches(config, mends.mended(mesh, "mesh.data", _given(config, "data") or 1)),
        *_products(config, can),
        *_costs(config),
        *_place(config),
        *_dtype(config, can),
        *_optimizer(config, can),
    ]


def profiling(config: DictConfig) -> list[Problem]:
    """What is wrong with the request of a profile: its micro-batches, and where its times shall be from."""
    return [*_micro_batches(config, _given(config, "data") or 1), *_costs(config)]


def fill(config: DictConfig, can: Capabilities, devices: int) -> None:
    """Write down the number of replicas where it follows from the devices: the batch is shared by them."""
    if config.mesh.data is None and can.data:
        config.mesh.data = resolve(config, can, devices, layers=devices).data


def resolve(config: DictConfig, can: Capabilities, devices: int, layers: int) -> Mesh:
    """The mesh of the run: a degree that is not given follows from the rest.

    One of them takes all devices that the given ones leave: tensor, else the pipeline (never more stages than layers),
    else data. What the engine, the cluster or the model does not allow is cut down to what they do, so that the other
    checks can go on; `request` and `against_profile` name it. Stages that the user gives one by one stay: `of_plan`.
    """
    degrees = {name: _given(config, name) if has(config, can, name) else 1 for name in DEGREES}
    degrees |= {name: degrees[name] or 1 for name in can.elsewhere}
    taken, free = 1, None
    for name, degree in degrees.items():
        if degree is None and free is None:
            free = name
        taken *= degree or 1
    known = {name: degree or 1 for name, degree in degrees.items()}
    if free:
        known[free] = max(1, devices // taken)
    known["tensor"] = min(known["tensor"], devices)
    if not stated(config):
        known["data"] = max(1, min(known["data"], devices // known["tensor"]))
        known["pipeline"] = max(1, min(known["pipeline"], layers, devices // (known["data"] * known["tensor"])))
    return Mesh(**known)


def stated(config: DictConfig) -> list[int]:
    """The layers of each stage where the user gives them himself (planner=given), else nothing."""
    return list(config.planner.get("balance") or [])


def balance_key(balance: Sequence[int]) -> str:
    """Such stages as a problem names them."""
    return f"planner.balance [{','.join(map(str, balance))}]"


def micro_batch(config: DictConfig) -> int:
    """Samples of one micro-batch, rounded down where they do not divide, and at least 1."""
    return max(1, config.batch.size // ((_given(config, "data") or 1) * config.batch.micro_batches))


def batch_size(config: DictConfig, profile: ModelProfile) -> int:
    """The batch whose micro-batches are those of the profile."""
    size: int = profile.micro_batch * config.batch.micro_batches * (_given(config, "data") or 1)
    return size


def of_plan(config: DictConfig, plan: Plan, mesh: Mesh, layers: int, cluster: Cluster) -> list[Problem]:
    """What a planner has got wrong: every layer must be in a stage, every stage on a device that there is, and the
    mesh must be the one that was asked for."""
    key = f"planner {config.planner.name}"
    found = []
    if plan.stages[-1].last + 1 != layers:
        found.append(
            Problem(key, f"placed {plan.stages[-1].last + 1} layers, the model has {layers}", "planner=balance")
        )
    if plan.mesh != mesh:
        found.append(Problem(key, f"planned for {plan.mesh}, asked for {mesh}", "planner=balance"))
    if max(plan.devices) >= cluster.devices:
        what = f"placed a stage on device {max(plan.devices)}, the last one is {cluster.devices - 1}"
        stages_of_the_user = _devices(config, mesh, cluster) if stated(config) else []
        found += stages_of_the_user or [Problem(key, what, "planner=balance")]
    return found


def of_memory(plan: Plan, peak_bytes: Sequence[int], cluster: Cluster, memory: MemoryModel) -> list[Problem]:
    """Each device whose predicted peak is more than it has; `peak_bytes` in the order of `plan.devices`."""
    there = max(0, cluster.device.memory_bytes - memory.reserve_bytes)
    needs: list[tuple[list[int], str]] = []  # stages, and what each of their devices needs
    for device, needed in zip(plan.devices, peak_bytes, strict=True):
        if needed <= there:
            continue
        owned = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        what = "{} of {}".format(*display.sizes(needed, there))
        if needs and needs[-1][1] == what and len(owned) == 1 and needs[-1][0][-1] == owned[0] - 1:
            needs[-1][0].append(owned[0])
        else:
            needs.append((owned, what))
    return [_too_full(owned, what, plan) for owned, what in needs]


def _too_full(owned: list[int], what: str, plan: Plan) -> Problem:
    """One stage, the stages of one device, or neighbours that need the same."""
    if len(owned) == 1:
        return Problem(f"stage {owned[0]}", f"needs {what}")
    if plan.stages[owned[0]].device == plan.stages[owned[1]].device:
        return Problem(f"stages {', '.join(map(str, owned))}", f"needs {what}")
    return Problem(f"stages {owned[0]} to {owned[-1]}", f"each needs {what}")


def _degrees(config: DictConfig, can: Capabilities) -> list[Problem]:
    """Degrees that the engine does not have."""
    what = {"data": "replicas", "pipeline": "pipeline stages", "tensor": "tensor shards"}
    return [
        Problem(f"mesh.{name} {degree}", f"{_engine(config, can, name)} has no {what[name]}",
                _or_instead(f"mesh.{name}=1", can, name))
        for name in ("data", "pipeline", "tensor")
        if (degree := _given(config, name) or 1) > 1 and not has(config, can, name)
        and not (name == "pipeline" and stated(config))  # told with the stages, when they are composed
    ]  # fmt: skip


def _engine(config: DictConfig, can: Capabilities, field: str) -> str:
    """The engine, with the setting that limits this capability."""
    setting = can.because.get(field)
    return f"engine={config.engine.name}" + (f" with {setting.typed}" if setting else "")


def _or_instead(mend: str, can: Capabilities, field: str) -> str:
    """A mend, or another setting of the engine that leaves it this capability."""
    setting = can.because.get(field)
    return f"{mend}, or {setting.instead}" if setting else mend


def _wanted(config: DictConfig, can: Capabilities) -> Mesh:
    """The degrees that are given and that the engine has."""
    return Mesh(**{name: _given(config, name) or 1 for name in DEGREES if has(config, can, name)})


def has(config: DictConfig, can: Capabilities, degree: str) -> bool:
    """Whether the engine has replicas, stages or shards on this cluster."""
    here = config.cluster.name == "local"
    return getattr(can, degree) and not (here and degree in can.elsewhere)


def _devices(config: DictConfig, mesh: Mesh, cluster: Cluster) -> list[Problem]:
    """More devices than the cluster has."""
    size = mesh.size
    if size <= cluster.devices:
        return []
    if 1 < mesh.pipeline == len(stated(config)) and size <= cluster.devices * mesh.pipeline:
        return [_too_many_stages(config, size // mesh.pipeline, cluster)]
    degrees = {f"mesh.{name}": n for name in ("data", "pipeline", "tensor") if (n := getattr(mesh, name)) > 1}
    key = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
    smaller = _smaller(degrees, cluster.devices)
    mend = mends.typed(smaller) + _more_devices(config, mesh, smaller.get("mesh.data", mesh.data), cluster.nodes)
    what = f"needs {size} devices, the cluster has {cluster.devices}{at_hand.origin(config.cluster)}"
    return [Problem(key, what, mend)]


def _smaller(degrees: Mapping[str, int], count: int) -> dict[str, int]:
    """The degrees that have to be smaller for so many devices, the largest first, each as large as it can be."""
    kept, found = dict(degrees), {}
    for name in sorted(degrees, key=lambda name: -degrees[name]):
        if (size := math.prod(kept.values())) > count:
            kept[name] = found[name] = max(1, count * kept[name] // size)
    return found


def _more_devices(config: DictConfig, mesh: Mesh, data: int, nodes: int) -> str:
    """The other way, where devices are threads of this machine, or tasks of a job on `nodes`: with a batch for all
    replicas, where a smaller mesh has only `data` of them. There is none where the batch is wrong for these, too."""
    more = f", or cluster.devices={mesh.size}"
    if at_hand.origin(config.cluster):
        more = f", or sbatch --ntasks-per-node={-(-mesh.size // nodes)}"
    if here(config) != "cpu" or (data < mesh.data and _micro_batches(config, data)):
        return ""
    return more + _batch_for(config, mesh.data) if data < mesh.data else more


def here(config: DictConfig) -> devices.Kind | None:
    """What the devices are where the cluster is this machine."""
    return devices.detect(config.cluster.device).kind if config.cluster.name == "local" else None


def _too_many_stages(config: DictConfig, each: int, cluster: Cluster) -> Problem:
    """Of stages that are given one by one; `each` of them needs so many devices."""
    balance = stated(config)
    room = cluster.devices // each
    what = f"has {len(balance)} stages{f' of {each} devices' if each > 1 else ''}, the cluster has {cluster.devices}"
    fewer = f"{room} numbers that add up to the model's layers" if room > 1 else f"planner.balance=[{sum(balance)}]"
    more = "" if here(config) == "cuda" else f", or cluster.devices={-(-len(balance) * each // cluster.nodes)}"
    return Problem(balance_key(balance), f"{what} device{'s' if cluster.devices > 1 else ''}", fewer + more)


def _micro_batches(config: DictConfig, data: int) -> list[Problem]:
    """All micro-batches of all `data` replicas have the same number of samples; those of a stored profile have its
    own (`harness.profile_check`)."""
    size, count = config.batch.size, config.batch.micro_batches
    if min(size, data, count) < 1 or config.profile:
        return []  # told elsewhere, as all that is out of range
    if size % data:
        mend = _batch_for(config, data).strip()
        return [Problem(f"batch.size {size}", f"cannot be shared equally by mesh.data {data}", mend)]
    if (size // data) % count == 0:
        return []
    whole = f"batch.size {size}" if data == 1 else f"batch.size {size} / mesh.data {data}"
    nearest = " or ".join(map(str, divisors.around(size // data, count)))
    return [Problem(f"batch.micro_batches {count}", f"does not divide {whole}", nearest)]


def _batch_for(config: DictConfig, data: int) -> str:
    """What to type for the nearest batch that so many replicas share, in as many micro-batches; "" where it is that."""
    size, each = config.batch.size, max(1, data * config.batch.micro_batches)
    nearest = max(1, round(size / each)) * each
    return "" if nearest == size or config.profile else f" batch.size={nearest}"


def _place(config: DictConfig) -> list[Problem]:
    if config.mode == "run" and config.cluster.name != "local":
        what = "is only described, runs need cluster=local"
        return [Problem(f"cluster {config.cluster.name}", what, "mode=simulate, or cluster=local")]
    return []


def _products(config: DictConfig, can: Capabilities) -> list[Problem]:
    """A planner of matrix products needs an engine that splits them; some of what it plans is for planning only."""
    planner = config.planner.name
    if not registry.splits_products(planner):
        return []
    if not has(config, can, "tensor"):
        what = f"splits matrix products, {_engine(config, can, 'tensor')} has no tensor shards"
        return [Problem(f"planner {planner}", what, "engine=sbp, or planner=balance")]
    if config.mode != "run":
        return []
    what = "is a cost model, nothing runs it"
    if planner == "summa":
        return [Problem("planner summa", what, "planner=autoddl, or mode=plan")]
    return [
        Problem(f"planner.{key} {value}", what, f"planner.{key}={mend}, or mode=plan")
        for key, value, mend in (("paths", "paper", "mixed"), ("splits", "any", "even"))
        if config.planner.get(key) == value
    ]


def _costs(config: DictConfig) -> list[Problem]:
    """Scaled times are those of another device: of the profile's, or of this machine for a described cluster."""
    if config.costs == "scaled" and config.cluster.name == "local" and not config.profile:
        what = "needs a profile of another device, this machine is measured as it is"
        return [Problem("costs scaled", what, "profile=FILE, or costs=measured")]
    return []


def _dtype(config: DictConfig, can: Capabilities) -> list[Problem]:
    dtype = config.precision.dtype
    if dtype in can.dtypes:
        return []
    what = f"{_engine(config, can, 'dtypes')} takes {', '.join(can.dtypes)}"
    return [Problem(f"precision.dtype {dtype}", what, _or_instead(f"precision.dtype={can.dtypes[0]}", can, "dtypes"))]


def _optimizer(config: DictConfig, can: Capabilities) -> list[Problem]:
    name = config.optimizer.name
    if name in can.optimizers:
        return []
    what = f"{_engine(config, can, 'optimizers')} takes {', '.join(can.optimizers)}"
    mend = _or_instead(f"optimizer.name={can.optimizers[0]}", can, "optimizers")
    return [Problem(f"optimizer.name {name}", what, mend)]


def _given(config: DictConfig, degree: str) -> int | None:
    value: int | None = config.mesh[degree]
    return value
