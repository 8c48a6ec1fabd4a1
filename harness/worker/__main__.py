"""The worker of a run, started by its parent for all that needs torch: `python -m harness.worker RUN_DIR ACTION`.

    train [STEP [TOKEN]]   train as planned, on from STEP    metrics.jsonl, trace.json.gz, result.json
    profile SAMPLES        measure the model on one device   profile.json
    count SAMPLES          count its work, without a run     profile.json
    check                  is profile.json of this model?
    machine KIND           measure this machine's devices    machine.json
    engine                 measure its own time, as machine.json says how fast this machine is    engine_costs.json
    calibrate DEVICES      time collectives among them       timings.json

With `serve SOCKET` in place of both it forks a worker for each client (`harness.launch.fork_server`).

With `join` alone it is a rank that torchrun has started (`harness.worker.member`).

With a TOKEN it is one of several ranks that are started alone; it meets the others in the run's folder
(`harness.launch.slurm_ranks`).

A worker reads config.yaml, plan.json and profile.json in the run's folder, and writes its results there. It never
sees Hydra or the tracker, and of the record only what its checkpoints hold: those are the parent's.
"""

from __future__ import annotations

import errno
import functools
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from harness.checks import formats
from harness.config import registry
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.run_files import CONFIG, PLAN, PROFILE
from harness.host import launched, machine, malloc
from harness.interfaces import Capabilities, OptimizerSpec, SessionSpec
from harness.launch import failure, fork_server, network, signal_watcher
from harness.launch.failure import Failure
from harness.run import folder_lock
from harness.worker import profile_tasks
from harness.worker.profile_tasks import say, torch_devices


def run_action(arguments: list[str]) -> None:
    """Run the action and exit; an error is left in `error.json`, and its traceback in the log."""
    malloc.tune()
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        sys.exit(0 if arguments == ["--help"] else 2)
    if arguments[0] == "serve":
        arguments = fork_server.serve(int(arguments[1]))
    if arguments[0] == "join":
        from harness.worker import member

        arguments = member.join()
    folder, action, *words = Path(arguments[0]), *(arguments[1:] or ["train"])
    rank = launched.place().rank if action == "train" and len(words) == 2 else None
    signal_watcher.watch(folder, rank)
    code = 0
    folder_lock.adopt(folder)
    try:
        config = OmegaConf.load(folder / CONFIG)
        assert isinstance(config, DictConfig)
        ACTIONS[action](folder, config, *words)
    except BaseException as error:
        code = failure.DISK_FULL_CODE if isinstance(error, OSError) and error.errno == errno.ENOSPC else 1
        with suppress(OSError):  # the disk may be full
            traceback.print_exc()
        with suppress(OSError):
            Failure.of(error, rank).report(folder)
    if rank is not None:
        from harness.launch import slurm_ranks

        slurm_ranks.exit_now(code)
    sys.exit(code)


def train(folder: Path, config: DictConfig, start: str = "0", token: str = "") -> None:
    """Train as planned, from the checkpoint after `start` steps on: all that a training run is, in order.

    Writes `metrics.jsonl` and, unless it was stopped, `trace.json.gz` and `result.json`. With a `token` this process is
    one of several ranks that are started alone, of which rank 0 writes.
    """
    profile = ModelProfile.load(folder / PROFILE)
    malloc.tune(profile.largest_bytes)
    say("loading torch")
    import torch

    from harness.launch.forked_ranks import run_session_on_ranks
    from harness.launch.slurm_ranks import Rendezvous
    from harness.measure import check_layers
    from harness.runtime import collectives
    from harness.runtime.training_state import choose_kernels
    from harness.worker.checkpoints import Checkpoints, When, run_state
    from harness.worker.training_loop import Loop, save_result, train_steps

    collectives.outlast(config.launch.timeout_s)
    plan = Plan.load(folder / PLAN)
    names = torch_devices(config, max(plan.mesh.size, *(device + 1 for device in plan.devices)))
    rendezvous = Rendezvous(folder, token) if token else None
    if rendezvous and names[0] != "cpu":
        own = f"cuda:{rendezvous.place.local % torch.cuda.device_count()}"  # Slurm may show it its GPU alone
        names = (own,) * len(names)
    choose_kernels(config.precision.tf32, config.precision.cudnn_benchmark)
    if names[0] == "cpu":
        torch.set_num_threads(1)  # engines take more where they are configured to
    model = registry.build("model", config.model)
    if profile.times != "measured" and not (rendezvous and rendezvous.rank):  # what measures them compares them
        check_layers.check(model, "cpu", say)
    data = registry.build("data", config.data, model, config.seed)
    engine = registry.build("engine", config.engine)
    if engine.capabilities.multi_process:
        network.use(config.launch.interface)
    spec = _spec(config, names, profile, engine.capabilities)
    if not (rendezvous and rendezvous.rank):
        say(f"building {model.name} on {', '.join(names)}")

    loop = Loop(config.batch.size, config.steps, config.warmup, tuple(config.launch.profiler))
    when = When(config.launch.checkpoint_every, config.launch.end_checkpoint)
    sharded = config.launch.sharded_checkpoints
    checkpoints = Checkpoints(folder, int(start), when, say, run_state(folder), sharded)
    quiet_s = machine.reference_s("cpu") if names[0] == "cpu" else 0.0
    train_session = functools.partial(
        train_steps, data=data, loop=loop, folder=folder, checkpoints=checkpoints, say=say, quiet_s=quiet_s
    )
    if engine.capabilities.multi_process:  # a process for each device, which enters the session and trains
        opened, mpi = engine.session(model, plan, spec), engine.capabilities.mpi
        done = run_session_on_ranks(opened, train_session, plan.mesh.size, names, mpi, rendezvous)
    else:
        with engine.session(model, plan, spec) as session:
            signal_watcher.describe(session.activity)
            done = train_session(session)
    if done:
        save_result(*done, folder, plan.devices, model)


def _spec(config: DictConfig, names: tuple[str, ...], profile: ModelProfile, can: Capabilities) -> SessionSpec:
    precision = config.precision
    here = machine.stored(names[0].partition(":")[0], tf32=precision.tf32)
    peaks = here.device.peak_flops if here else {}
    return SessionSpec(
        names,
        OptimizerSpec(**config.optimizer),
        precision.dtype,
        precision.autocast,
        config.seed,
        unused=any(layer.traits.unused for layer in profile.layers),
        by_value=bool(profile.by_value),
        channels_last=precision.channels_last,
        compile=precision.compile,
        grad_scaler=precision.grad_scaler,
        cuda_graphs=precision.cuda_graphs,
        instead=formats.without_float16(config, can, peaks),
    )


ACTIONS: dict[str, Callable[..., None]] = {
    "train": train,
    "profile": profile_tasks.profile_model,
    "count": profile_tasks.count_model,
    "check": profile_tasks.compare_profile,
    "machine": profile_tasks.measure_machine,
    "engine": profile_tasks.measure_engine,
    "calibrate": profile_tasks.calibrate_links,
}


if __name__ == "__main__":
    run_action(sys.argv[1:])
