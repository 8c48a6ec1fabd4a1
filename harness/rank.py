"""One rank of a run, started by its parent: `python -m harness.rank RUN_DIR ACTION`, for all that needs torch.

    train [STEP [TOKEN]]   train as planned, on from STEP    metrics.jsonl, trace.json.gz, result.json
    profile SAMPLES   measure the model on one device        profile.json
    count SAMPLES     count its work without running it      profile.json
    check             is profile.json one of this model?
    machine KIND      measure this machine's devices         machine.json
    calibrate DEVICES time collectives among them            timings.json

With a TOKEN it is one of several that srun has started; it meets the others in the run's folder (`harness.meeting`).

It reads config.yaml, plan.json and profile.json in the run's folder, and writes there what it finds out. It never
sees Hydra, the tracker or the record: those are the parent's.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from harness import allocation, clusters, devices, display, failure, files, launch, machine, malloc, registry
from harness.failure import Failure
from harness.interfaces import Model, OptimizerSpec, Session, SessionSpec
from harness.memory import DTYPE_BYTES
from harness.period import period_s
from harness.phases import phases_s
from harness.plan import Plan
from harness.problem import CannotRun, Problem
from harness.profile import ModelProfile
from harness.run_files import RESULT, TRACE
from harness.trace import Trace

if TYPE_CHECKING:
    from torch import nn

SLACK = 1.7
"""What a process takes, by what is counted: AmoebaNet-D (18, 256) and (18, 416) on the CPU 1.7 and 1.5 times."""
PROFILE, MACHINE = "profile.json", "machine.json"


def main(arguments: list[str]) -> None:
    """Do the work; whatever goes wrong is left in `error.json`, and its traceback in the log."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm may send it to all of a job; the parent knows what to do
    if allocation.found():  # Slurm sends this one to all processes of a job, first; the parent has the ranks stop
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    malloc.tune()
    if not arguments:
        sys.exit(f"usage: python -m harness.rank RUN_DIR [{' | '.join(ACTIONS)}]")
    folder, action, *words = Path(arguments[0]), *(arguments[1:] or ["train"])
    rank = int(os.environ["SLURM_PROCID"]) if action == "train" and len(words) == 2 else None
    code = 0
    try:
        config = OmegaConf.load(folder / "config.yaml")
        assert isinstance(config, DictConfig)
        ACTIONS[action](folder, config, *words)
    except BaseException as error:
        code = failure.DISK_FULL_CODE if isinstance(error, OSError) and error.errno == errno.ENOSPC else 1
        traceback.print_exc()
        with suppress(OSError):
            Failure.of(error, rank).report(folder)
    if rank is not None:
        from harness import joined

        joined.leave(code)
    sys.exit(code)


def profile(folder: Path, config: DictConfig, samples: str) -> None:
    """Measure the model for micro-batches of `samples` on one device; writes `profile.json`."""
    say("loading torch")
    from harness import profiling

    model = _model(config)
    say(f"profiling {model.name}, micro-batches of {samples}")
    device, precision = _torch_devices(config, 1)[0], config.precision
    there = devices.detect("cpu" if device == "cpu" else "cuda").memory_bytes
    check_size(model, int(samples), precision.dtype, precision.autocast, there)
    found = profiling.measure(model, int(samples), precision.dtype, device, autocast=precision.autocast)
    found.save(folder / PROFILE)


def count(folder: Path, config: DictConfig, samples: str) -> None:
    """Count the model's work for micro-batches of `samples`; writes `profile.json`, without times."""
    say("loading torch")
    from harness import counting

    model = _model(config)
    say(f"counting {model.name}, micro-batches of {samples}")
    counting.count(model, int(samples), config.precision.dtype, config.precision.autocast).save(folder / PROFILE)


def check(folder: Path, config: DictConfig) -> None:
    """Raise `CannotRun` if `profile.json`, which is the user's, is not one of the model."""
    say("loading torch")
    check_profile(_model(config), ModelProfile.load(folder / PROFILE), config.profile)


def measure_machine(folder: Path, config: DictConfig, wanted: str) -> None:
    """Measure the devices of one kind; writes `machine.json`."""
    say("loading torch")
    machine.measure(wanted).save(folder / MACHINE)


def calibrate(folder: Path, config: DictConfig, count: str) -> None:
    """Time collectives among up to `count` devices; writes `timings.json`."""
    say("loading torch")
    from harness.calibration import TIMINGS, timing

    names = _torch_devices(config, int(count))
    timing.measure(names, config.steps, config.warmup, say).save(folder / TIMINGS)


def train(folder: Path, config: DictConfig, begun: str = "0", token: str = "") -> None:
    """Train as planned, from the checkpoint after `begun` steps on; writes `metrics.jsonl` and, if it comes to its end,
    `trace.json.gz` and `result.json`. With a `token` as one of several ranks, of which rank 0 writes."""
    malloc.tune(ModelProfile.load(folder / PROFILE).largest_bytes)
    say("loading torch")
    import torch

    from harness import ranks, training
    from harness.checkpoint import Checkpoints
    from harness.meeting import Meeting

    meeting = Meeting(folder, token) if token else None
    plan = Plan.load(folder / "plan.json")
    names = _torch_devices(config, max(plan.mesh.size, *(device + 1 for device in plan.devices)))
    if meeting and names[0] != "cpu":
        own = f"cuda:{meeting.local % torch.cuda.device_count()}"  # Slurm may show a rank its own GPU alone
        names = (own,) * len(names)
    if names[0] == "cpu":
        torch.set_num_threads(1)  # engines take more where they are told to
    model = _model(config)
    data = registry.build("data", config.data, model, config.seed)
    engine = registry.build("engine", config.engine)
    spec = SessionSpec(names, OptimizerSpec(**config.optimizer), config.precision.dtype, config.precision.autocast,
                       config.seed)  # fmt: skip
    if not (meeting and meeting.rank):
        say(f"building {model.name} on {', '.join(names)}")
    loop = training.Loop(config.batch.size, config.steps, config.warmup)

    def work(session: Session) -> tuple[dict[str, Any], Trace] | None:
        reports = ranks.first()
        tell = say if reports else lambda text: None
        checkpoints = Checkpoints(folder, int(begun), config.launch.checkpoint_every, tell)
        return training.train(session, data, loop, folder if reports else None, checkpoints, tell)

    done = launch.call(engine, model, plan, spec, work, meeting)
    if done is None:
        return
    metrics, trace = done
    metrics |= training.use_of_devices(trace, plan.devices)
    metrics |= {"period_s": period_s(trace), "phases_s": phases_s(trace)}
    if model.task == "text":
        metrics["tokens_per_s"] = metrics["throughput"] * model.input_shape[0]
    trace.save(folder / TRACE)
    files.write_text(folder / RESULT, json.dumps(metrics))


def check_size(model: Model, samples: int, dtype: str, autocast: str | None, there_bytes: int) -> None:
    """Raise `CannotRun` if the whole model does not fit where it is to be profiled.

    That takes its weights, their gradients, and all that autograd saves of `samples` samples.
    """
    import torch

    from harness import counting

    with torch.device("meta"):
        state = 2 * _parameter_bytes(model.layers(), dtype)
    needed, of = state, "for weights and gradients alone"
    if state <= there_bytes:
        counted = counting.count(model, samples, dtype, autocast)
        needed = round(SLACK * (state + counted.sum("saved_bytes", 0, len(counted.layers) - 1)))
        of = f"for weights, gradients and the activations of {samples} samples with their workspaces"
    if needed > there_bytes:
        here = display.size(there_bytes)
        what = f"needs {display.size(needed)} to be profiled, {of}; {here} are here"
        raise CannotRun(
            [Problem(f"model {model.name}", what, "costs=analytic, or profile=FILE, measured where it fits")]
        )


def _parameter_bytes(layers: nn.Module, dtype: str) -> int:
    return sum(parameter.numel() for parameter in layers.parameters()) * DTYPE_BYTES[dtype]


def check_profile(model: Model, profile: ModelProfile, file: str) -> None:
    """Raise `CannotRun` if a stored profile is not of this model: another name, other layers, parameters or skips."""
    import torch

    from harness.skip import layer_skips, named_layers

    with torch.device("meta"):
        layers = model.layers()
    size = _parameter_bytes(layers, profile.dtype)
    stored = profile.parameter_bytes(0, len(profile.layers) - 1)
    skips = layer_skips(named_layers(layers))
    what = f"is of {model.name} with {{}}, it has {{}} now"
    wrong = ""
    if profile.model != model.name:
        wrong = f"is of {profile.model or 'a model without a name'}, the model is {model.name}"
    elif len(profile.layers) != len(layers):
        wrong = what.format(f"{len(profile.layers)} layers", len(layers))
    elif stored != size:
        wrong = what.format(f"{stored} bytes of parameters", size)
    elif {(skip.source, skip.target) for skip in profile.skips} != {(skip.source, skip.target) for skip in skips}:
        known = ", ".join([skip.name for skip in skips[:3]] + ["..."] * (len(skips) > 3))
        wrong = f"has {len(profile.skips) or 'no'} skips, {model.name} has {len(skips)} ({known})"
    if wrong:
        raise CannotRun(
            [Problem(f"profile {file}", wrong, "python run.py mode=profile model=..., or leave model= out")]
        )


def say(text: str) -> None:
    """A line in the log: it also tells the parent that this rank is getting on."""
    print(text, flush=True)


def _model(config: DictConfig) -> Any:
    return registry.build("model", config.model)


def _torch_devices(config: DictConfig, count: int) -> tuple[str, ...]:
    cluster = clusters.of(config.cluster)
    found = devices.detect(cluster.device if clusters.is_local(cluster) else "auto")
    return devices.torch_names(found.kind, count)


ACTIONS: dict[str, Callable[..., None]] = {
    "train": train,
    "profile": profile,
    "count": count,
    "check": check,
    "machine": measure_machine,
    "calibrate": calibrate,
}


if __name__ == "__main__":
    main(sys.argv[1:])
