"""One rank of a run, started by its parent: `python -m harness.rank RUN_DIR [train | profile SAMPLES]`.

It reads config.yaml, plan.json and profile.json in the run's folder, and writes there what it finds out. It never
sees Hydra, the tracker or the record: those are the parent's.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from harness import clusters, devices, display, files, launch, malloc, registry
from harness.clusters import ClusterConfig
from harness.failure import Failure
from harness.interfaces import Model, OptimizerSpec, SessionSpec
from harness.memory import DTYPE_BYTES
from harness.plan import Plan
from harness.problem import CannotRun, Problem
from harness.profile import ModelProfile

if TYPE_CHECKING:
    from torch import nn

RESULT = "result.json"


def main(arguments: list[str]) -> None:
    """Do the work; whatever goes wrong is left in `error.json`, and its traceback in the log."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    malloc.tune()
    if not arguments:
        sys.exit("usage: python -m harness.rank RUN_DIR [train | profile SAMPLES]")
    folder, action, *numbers = Path(arguments[0]), *(arguments[1:] or ["train"])
    try:
        config = OmegaConf.load(folder / "config.yaml")
        assert isinstance(config, DictConfig)
        if action == "profile":
            profile(folder, config, int(numbers[0]))
        else:
            train(folder, config)
    except BaseException as error:
        with suppress(OSError):
            Failure.of(error).report(folder)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            sys.exit(launch.DISK_FULL_CODE)  # error.json may not have fitted either
        raise


def profile(folder: Path, config: DictConfig, samples: int) -> None:
    """Measure the model for micro-batches of `samples` on one device; writes `profile.json`."""
    say("loading torch")
    from harness import profiling

    model = _model(config)
    say(f"profiling {model.name}, micro-batches of {samples}")
    device, precision = _torch_devices(config, 1)[0], config.precision
    check_size(model, precision.dtype, devices.detect("cpu" if device == "cpu" else "cuda").memory_bytes)
    found = profiling.measure(model, samples, precision.dtype, device, autocast=precision.autocast)
    found.save(folder / "profile.json")


def train(folder: Path, config: DictConfig) -> None:
    """Train as planned; writes `metrics.jsonl`, `trace.json.gz` and, at the end, `result.json`."""
    say("loading torch")
    import torch

    from harness import training

    plan = Plan.load(folder / "plan.json")
    names = _torch_devices(config, max(plan.devices) + 1)
    if names[0] == "cpu":
        torch.set_num_threads(1)  # engines take more where they are told to
    model = _model(config)
    if config.profile:
        check_profile(model, ModelProfile.load(folder / "profile.json"), config.profile)
    data = registry.build("data", config.data, model, config.seed)
    engine = registry.build("engine", config.engine)
    spec = SessionSpec(names, OptimizerSpec(**config.optimizer), config.precision.dtype, config.precision.autocast,
                       config.seed)  # fmt: skip
    say(f"building {model.name} on {', '.join(names)}")
    loop = training.Loop(config.batch.size, config.steps, config.warmup)
    metrics, trace = launch.call(
        engine, model, plan, spec, lambda session: training.train(session, data, loop, folder, say)
    )
    metrics |= training.use_of_devices(trace, plan.devices)
    if model.task == "text":
        metrics["tokens_per_s"] = metrics["throughput"] * model.input_shape[0]
    trace.save(folder / "trace.json.gz")
    files.write_text(folder / RESULT, json.dumps(metrics))


def check_size(model: Model, dtype: str, there_bytes: int) -> None:
    """Raise `CannotRun` if the weights and gradients of the whole model do not fit where it is to be profiled."""
    import torch

    with torch.device("meta"):
        needed = 2 * _parameter_bytes(model.layers(), dtype)
    if needed > there_bytes:
        here = display.size(there_bytes)
        what = f"needs {display.size(needed)} to be profiled, for weights and gradients alone; {here} are here"
        raise CannotRun([Problem(f"model {model.name}", what, "profile=FILE, measured where it fits")])


def _parameter_bytes(layers: nn.Module, dtype: str) -> int:
    return sum(parameter.numel() for parameter in layers.parameters()) * DTYPE_BYTES[dtype]


def check_profile(model: Model, profile: ModelProfile, file: str) -> None:
    """Raise `CannotRun` if a stored profile is not of this model: another name, other layers or other parameters."""
    import torch

    with torch.device("meta"):
        layers = model.layers()
    size = _parameter_bytes(layers, profile.dtype)
    stored = profile.sum("param_bytes", 0, len(profile.layers) - 1)
    what = f"is of {model.name} with {{}}, it has {{}} now"
    wrong = []
    if profile.model != model.name:
        wrong.append(f"is of {profile.model or 'a model without a name'}, the model is {model.name}")
    elif len(profile.layers) != len(layers):
        wrong.append(what.format(f"{len(profile.layers)} layers", len(layers)))
    elif stored != size:
        wrong.append(what.format(f"{stored:.0f} bytes of parameters", size))
    if wrong:
        raise CannotRun([Problem(f"profile {file}", text, "leave profile= out, or mode=plan") for text in wrong])


def say(text: str) -> None:
    """A line in the log: it also tells the parent that this rank is getting on."""
    print(text, flush=True)


def _model(config: DictConfig) -> Any:
    return registry.build("model", config.model)


def _torch_devices(config: DictConfig, count: int) -> tuple[str, ...]:
    cluster = ClusterConfig(**config.cluster)
    found = devices.detect(cluster.device if clusters.is_local(cluster) else "auto")
    return devices.torch_names(found.kind, count)


if __name__ == "__main__":
    main(sys.argv[1:])
