"""Every fix that a problem offers is applied to what was typed, and the run is accepted.

A run is examined by all that happens before a worker trains: composition, checks, planning, simulation, and the search
of mode=tune. Of several problems each fix is applied together with the first fixes of the others. This machine has two
cores, and layer times come from two profiles made by hand.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from rich.console import Console

from harness.checks import mesh, stored_profile, values
from harness.cli.compose import compose
from harness.core.cluster import Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun, Problem, apply, combined, line, refuse, typed
from harness.host import devices, machine
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.measure import calibration
from harness.planning import prepare
from harness.planning.profiles import Profiles
from harness.planning.tune.candidate_search import Tuner
from harness.report.progress import Progress
from harness.sweep.points import expand
from slurm import partition, resources, settings
from tests.harness.sbp.nets import transformer

Examine = Callable[[Sequence[str]], list[Problem]]
"""Why overrides are refused."""

HERE = DetectedDevices("cpu", "a CPU", 2, 16 * 10**9)
MACHINE = Machine(Device(HERE.name, 8 * 10**9, {"float32": 1e12}, 1e10), Link(1e-5, 1e-9), None, 2.0, 2.0)
SOURCE = "measured on a CPU"
LAYER = LayerProfile("layer", 0.01, 0.02, param_bytes=10**7, output_bytes=10**6, saved_bytes=10**7, flops=10**9)
UNET = ModelProfile((LAYER,) * 8, "unet_x", 1, input_bytes=1000, source=SOURCE)
GPT = transformer(samples=1)
GPT = replace(
    GPT,
    layers=tuple(replace(layer, forward_s=0.01, backward_s=0.02) for layer in GPT.layers),
    model="gpt_x",
    source=SOURCE,
)
FLAT = "cluster=flat cluster.bandwidth_gb_s=1"
PARTITION = partition.Partition("debug", 4, 8, 16000, 2, "2:00:00", True, True)

CASES = {
    "values": [
        "steps=0",
        "steps=x",
        "warmup=-1",
        "batch.size=0",
        "batch.size=1.5",
        "batch.micro_batches=0",
        "seed=-1",
        "costs=cheap",
        "mode=trian",
        "launch.timeout_s=-1 launch.grace_s=-1 launch.checkpoint_every=-1",
        "launch.ranks=all",
        "launch.ranks=srun",
        "memory=adamm",
        "tracker=wandb tracker.mode=of",
        "steps=0 batch.size=0 costs=cheap launch.timeout_s=-1",
    ],
    "keys": [
        "batch.micro_batch=4",
        "optimizer.nam=adam",
        "cluster.memory=4",
        "cluster.pek_tflops.float32=3",
        "engine.micro_batches=4",
        "lr=0.1",
        "micro_batch_size=2",
        "micro_batch_size=4 global_batch_size=32 dp=2",
        "engine.chunks=8",
        "batch_size=30",
        "tp=2 model=gpt",
        "tp=2 pp=2 model=gpt",
        "pp=2 dp=2",
        "engine.balance=[4,4]",
        "engine=single balance=[4,4]",
        "learning_rate=0.1 hidden_size=64 num_layers=2 model=gpt",
        "zero_stage=3 engine=deepspeed engine.checkpoint=always",
        "zero_stage=2 dp=2",
        "world_size=4",
        "engine=zero",
        "engine=megatron model=gpt",
        "engine=pipedream",
        "engine=dp",
        "engine=madpipe",
        "+steps=3",
        "~steps",
        "engine@foo=gpipe",
        "+steps=3 ~steps",
        "engine@foo=gpipe engine=single",
        "engine=gpip",
        "model=unett",
        "planner=balanc",
        "cluster=flatt",
        "data=synthetik",
        "tracker=wanb",
        "precision=fp17",
        "precision=half",
        "precision=fp8",
        "precision.dtype=fp64",
        "precision.dtype=float8",
        "precision.autocast=half",
    ],
    "mesh": [
        "mesh.pipeline=0",
        "mesh.pipeline=16",
        "mesh.pipeline=12 cluster.devices=16",
        "mesh.data=2",
        "mesh.tensor=2",
        "engine=single mesh.pipeline=2",
        "engine=ddp mesh.pipeline=2",
        "engine=ddp mesh.data=3",
        "engine=ddp mesh.data=4",
        "engine=deepspeed mesh.data=2 mesh.pipeline=2",
        "engine=myelin mesh.data=4 mesh.pipeline=4",
        "engine=sbp model=gpt mesh.tensor=2",
        "engine=sbp mesh.tensor=2",
        "planner=given planner.balance=[0,8]",
        "planner=given planner.balance=[4,3]",
        "planner=given planner.balance=[1,1,1,1,4]",
        "planner=given planner.balance=[4,4] mesh.pipeline=3",
        "planner=given planner.balance=[4,4] engine=ddp",
        "planner=given planner.balance=[4,4] engine=single",
    ],
    "batch and profile": [
        "batch.size=7 batch.micro_batches=4",
        "batch.size=4 batch.micro_batches=8",
        "engine=ddp mesh.data=2 batch.size=7",
        "engine=periodic planner=pipedream engine.update_every=3",
        "engine=torch_pipelining engine.schedule=interleaved1f1b batch.micro_batches=3",
        "profile=p.json batch.size=30",
        "profile=p.json batch.size=32 batch.micro_batches=3",
        "profile=p.json batch.size=7 mesh.data=2 engine=ddp",
        "profile=p.json model=gpt",
        "profile=p.json costs=scaled",
        "profile=p.json mode=run",
        "profile=nowhere.json",
        "costs=scaled",
        "mode=profile costs=scaled",
        "mode=profile batch.size=7 model=gpt data=text data.tokens=letters",
    ],
    "precision and optimizer": [
        "precision=fp16",
        "engine=single precision=fp16",
        "engine=ddp mesh.data=2 precision=fp16",
        "engine=ddp mesh.data=2 precision.dtype=float16",
        "engine=fsdp mesh.data=2 precision=fp16",
        "engine=sbp model=gpt planner=megatron precision=fp16",
        "engine=ddp cluster=summit mesh.data=2 precision=fp16 costs=analytic",
        "engine=fsdp cluster=dgx_a100_40 precision=fp16 costs=analytic",
        "precision.autocast=float64",
        "engine=deepspeed precision=fp16",
        "engine=deepspeed precision=bf16",
        "engine=deepspeed precision=fp64 engine.zero=1 mesh.data=2",
        "engine=fsdp cluster=summit mesh.data=2 precision=mixed costs=analytic engine.mixed_precision=policy",
        "engine=ddp cluster=summit mesh.data=2 precision=mixed costs=analytic",
        "cluster=piz_daint mesh.pipeline=2 precision=bf16 costs=analytic",
        "engine=deepspeed cluster=summit mesh.pipeline=1 mesh.data=2 engine.zero=1 precision=bf16 costs=analytic",
        "mode=tune engine=ddp cluster=summit cluster.nodes=1 precision=mixed costs=analytic",
        "optimizer.name=lamb",
        "optimizer.lr=0",
        "optimizer.nesterov=true",
        "optimizer.nesterov=true optimizer.name=adamw",
        "optimizer.beta1=0.99",
        "engine=delayed model=mlp mesh.pipeline=2",
        "optimizer.momentum=0.9 optimizer.name=adam",
        "optimizer.beta1=1 optimizer.name=nadam",
        "engine=ddp mesh.data=2 optimizer.name=nadam optimizer.fused=true",
        "engine=fsdp mesh.data=2 optimizer.name=muon",
        "engine=fsdp mesh.data=2 engine.mixed_precision=policy",
        "engine=fsdp mesh.data=2 engine.mixed_precision=plicy precision=mixed",
        "engine=deepspeed engine.offload=true engine.zero=1 mesh.pipeline=2",
        "engine=myelin mesh.data=2 mesh.pipeline=2 batch.size=7 optimizer.name=lamb",
    ],
    "planners": [
        "planner=autoddl",
        "planner=megatron",
        "engine=single planner=autoddl",
        "engine=ddp planner=autoddl mesh.pipeline=2 precision=fp16 model=gpt",
        "mode=run engine=sbp model=gpt planner=summa planner.padded=true",
        "mode=run engine=sbp model=gpt planner=autoddl planner.paths=paper planner.splits=any",
        "mode=run engine=sbp planner=autoddl planner.paths=paper",
        "engine=sbp model=gpt planner=autoddl planner.search=fast",
        "engine=sbp model=gpt planner=autoddl planner.seed=3",
        "engine=sbp model=gpt planner=strategies planner.strategies=[block*:1x1x2]",
        "engine=sbp model=gpt planner=megatron mesh.tensor=3 cluster.devices=3",
        "mode=plan engine=sbp model=gpt planner=megatron cluster=dgx_a100_40 costs=measured mesh.tensor=7",
        "mode=plan engine=deepspeed model=gpt planner=megatron planner.dimensions=1 cluster=dgx_a100_40 costs=measured "
        "mesh.pipeline=1 mesh.tensor=7 batch.size=4 batch.micro_batches=4",
        "engine=periodic",
        "engine=periodic planner=madpipe planner.allocation=best",
        "engine=periodic planner=madpipe planner.duplex=full cluster=madpipe mesh.pipeline=2",
        "planner.by=size",
        "planner=uniform mesh.pipeline=9 cluster.devices=9",
        "engine=sbp model=gpt planner=megatron cluster=summit costs=measured mesh.tensor=48 batch.size=16",
        "engine=sbp model=gpt planner=megatron cluster=summit costs=measured mesh.tensor=4 batch.size=16",
        "engine=sbp model=gpt planner=megatron cluster=summit costs=measured mesh.tensor=8 batch.size=16",
        "mode=simulate engine=deepspeed cluster=summit planner=megatron cluster.nodes=1 mesh.tensor=4",
    ],
    "engines": [
        "engine.checkpoint=sometimes",
        "engine=torchgpipe engine.checkpoint=sometimes",
        "engine=torch_pipelining engine.schedule=zb",
        "engine=torch_pipelining engine.chunks=3",
        "engine=torch_pipelining engine.schedule=zbv engine.chunks=3",
        "engine=pipeline engine.schedule=zbx engine.transport=tcp",
        "engine=pipeline engine.schedule=looped_bfs engine.chunks=0",
        "engine=pipeline engine.schedule=zbv engine.chunks=3",
        "engine=pipeline engine.schedule=dualpipev batch.micro_batches=2",
        "engine=pipeline engine.schedule=interleaved1f1b batch.micro_batches=3",
        "engine=pipeline engine.schedule=search engine.checkpoint=always",
        "engine=pipeline engine.schedule=zb_h1 engine.placement=v engine.boundaries=search",
        "engine=deepspeed engine.zero=4",
        "engine=deepspeed engine.zero=2 mesh.pipeline=2",
        "engine=deepspeed engine.offload=true engine.zero=0",
        "engine=myelin engine.order=fifo engine.policy=first engine.checkpoint_every=often engine.k=-1",
        "engine=myelin engine.loss_scale=0 engine.pipeline_limit=0",
        "engine=periodic planner=pipedream engine.update_every=0",
        "engine=periodic planner=contiguous engine.versions=flush engine.update_every=2",
        "engine=periodic planner=contiguous engine.versions=stash engine.update_every=3",
        "engine=delayed engine.stages=99",
        "engine=delayed engine.stages=3 engine.in_flight=[1,2]",
        "engine=delayed engine.update_every=3",
        "engine=delayed engine.versions=stahs engine.corrections.lr_steps=-1",
        "engine=delayed engine.stages=3 engine.way_back=[1,2]",
        "engine=delayed engine.corrections.round_trip=true",
        "engine=delayed engine.corrections.discrepancy=0.135",
        "engine=delayed engine.versions=none engine.corrections.discrepancy=1",
        "engine=delayed engine.versions=none engine.corrections.discrepancy=0.1 engine.corrections.prediction=true",
        "engine=delayed model=gpt",
        "engine=delayed mesh.pipeline=2",
        "engine=delayed planner=madpipe",
        "engine=delayed engine.stages=3 model=mlp planner=given planner.balance=[5,3]",
    ],
    "memory": [
        f"{FLAT} cluster.devices=4 cluster.memory_gb=0.1 mesh.pipeline=2",
        f"{FLAT} cluster.devices=4 cluster.memory_gb=0.17 mesh.pipeline=2 engine=torchgpipe",
        f"{FLAT} cluster.devices=4 cluster.memory_gb=0.1 mesh.pipeline=2 engine=myelin",
        f"{FLAT} cluster.devices=4 cluster.memory_gb=0.2 engine=deepspeed",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=0.2 engine=deepspeed mesh.data=2 engine.zero=1 mesh.pipeline=1",
        f"{FLAT} cluster.devices=4 cluster.memory_gb=0.15 engine=torch_pipelining mesh.pipeline=2",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=0.05 engine=periodic planner=pipedream",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=0.05 engine=periodic planner=madpipe",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=0.2 batch.size=64 batch.micro_batches=4 mode=simulate",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=0.3 profile=p.json",
    ],
    "cluster": [
        "cluster=flat cluster.devices=0",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=-1",
        "cluster=flat cluster.devices=2 cluster.memory_gb=1 cluster.bandwidth_gb_s=0",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=1 cluster.duplex=both cluster.alpha_s=-1",
        "cluster.device=tpu",
        "cluster.nodes=2",
        "cluster.efficiency=2",
        "mode=run cluster=summit",
        f"{FLAT} cluster.devices=2 cluster.memory_gb=16 costs=analytic",
        "cluster=summit cluster.nodes=2 engine=ddp mesh.data=4",
        f"{FLAT} mode=run cluster.devices=2 cluster.memory_gb=1 mesh.pipeline=4 precision=fp16 batch.micro_batches=3",
    ],
    "model and data": [
        "model=mlp model.widths=[]",
        "model=gpt model.heads=3",
        "model=inception model.divisor=3",
        "model=densenet model.growth=0",
        "model=gpt data=images",
        "data=text",
        "data=images data.folder=nowhere",
        "model=gpt data=text data.file=nowhere.txt",
        "model=gpt data=text model.vocabulary=20",
    ],
    "tune and calibrate": [
        "mode=tune mesh.pipeline=3",
        "mode=tune engine=single mesh.pipeline=2",
        "mode=tune engine=delayed",
        "mode=tune profile=p.json batch.size=7",
        f"mode=tune {FLAT} cluster.devices=2 cluster.memory_gb=0.05",
        "mode=calibrate cluster=flat",
        "mode=calibrate cluster.bandwidth_gb_s=3",
        "mode=calibrate cluster.devices=1",
    ],
    "slurm": [
        "slurm.nodes=0 slurm.cpus=0 slurm.time=never slurm.mem=4X slurm.parallel=0",
        "slurm.node=3",
        "slurm.tasks=x",
        "slurm.nodes=9",
        "slurm.nodes=2 slurm.cpus=3 slurm.tasks=4",
        "slurm.tasks=16",
        "slurm.gpus=4 slurm.time=4:00:00 slurm.mem=32G",
        "slurm.nodes=1 slurm.tasks=2",
    ],
    "sweeps": ["+sweeps=smok", "+sweeps=gpt_text scale=huge", "steps=1,2 scale=paper", "steps=1,2 sead=3"],
}
LATER = {
    "mesh.pipeline=16": "how many layers there are is known once there is a profile",
    "engine=sbp mesh.tensor=2": "whether a model has matmuls is known once there is a profile",
    "engine=single planner=autoddl": "whether a model has matmuls is known once there is a profile",
    "mode=run engine=sbp planner=autoddl planner.paths=paper": "whether a model has matmuls is known by its profile",
    "engine=deepspeed engine.offload=true engine.zero=0": "what engines refuse is checked once their keys are right",
}
"""Cases in which the first fix leads to a later check, whose first fix must lead to an accepted run."""


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": HERE)
    monkeypatch.setattr(devices, "cores", lambda: HERE.count)
    monkeypatch.setattr(Profiles, "made", lambda self, origin: _profile(self.config))
    monkeypatch.setattr(Profiles, "compare", lambda self: None)
    machine.store(MACHINE)
    monkeypatch.chdir(tmp_path)
    UNET.for_samples(4).save(Path("p.json"))

    def examined(overrides: Sequence[str]) -> list[Problem]:
        try:
            if any(text.startswith("slurm.") for text in overrides):
                _submit(overrides)
            elif any(text.startswith(("+sweeps=", "scale=")) or "," in text.partition("[")[0] for text in overrides):
                for point in expand(overrides)[:1]:
                    compose(point.overrides)
            else:
                _prepare(overrides)
        except CannotRun as error:
            return list(error.problems)
        return []

    return examined


def _profile(config: DictConfig) -> ModelProfile:
    found, precision = {"gpt": GPT}.get(config.model.name, UNET), config.precision
    return replace(found.for_samples(mesh.micro_batch(config)), dtype=precision.dtype, autocast=precision.autocast)


def _prepare(overrides: Sequence[str]) -> None:
    config = compose(overrides)
    stored_profile.follow(config, overrides)
    folder, progress = Path(), Progress(Console(file=io.StringIO()))
    ways: dict[str, Callable[[], Any]] = {
        "profile": lambda: prepare.ground(config, overrides, folder, progress),
        "tune": lambda: Tuner(config, overrides, folder, progress).search(),
        "calibrate": lambda: calibration.ready(config),
    }
    ways.get(config.mode, lambda: prepare.prepare(config, overrides, folder, progress))()


def _submit(overrides: Sequence[str]) -> None:
    """Points of four tasks."""
    wanted = settings.read(overrides)
    refuse(partition.shortages(wanted, wanted.nodes or 1, wanted.tasks or 1, PARTITION), settings.TITLE)
    shape = resources.shape([resources.Need(4)], wanted, PARTITION)
    refuse(partition.shortages(wanted, shape.nodes, shape.tasks, PARTITION), settings.TITLE)


def failures(examine: Examine, overrides: Sequence[str], later: bool = False) -> list[str]:
    """The fixes after which something is still wrong, each with that."""
    problems = examine(overrides)
    assert any(problem.fixes for problem in problems), f"{overrides} are to be refused, with fixes"
    found = []
    for problem in problems:
        for fix in problem.fixes:
            every = [fix if one is problem else one.fixes[0] for one in problems if one.fixes]
            fixed = apply(overrides, combined(every))
            left = examine(fixed)
            if later and left:
                fixed = apply(fixed, combined([one.fixes[0] for one in left if one.fixes]))
                left = examine(fixed)
            if left:
                found.append(f"{typed(fix)}: {shlex.join(fixed)}: {'; '.join(map(line, left))}")
    return found


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    "text", [pytest.param(text, id=f"{group}: {text}") for group in CASES for text in CASES[group]]
)
def test_every_fix_is_accepted(text: str, examine: Examine) -> None:
    overrides = shlex.split(text)
    runs = not any(one.startswith(("mode=", "slurm.", "scale=", "+sweeps=")) or "=1,2" in one for one in overrides)
    assert failures(examine, ["mode=plan", *overrides] if runs else overrides, text in LATER) == []


def test_a_fix_that_does_not_help_is_found(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = values.problems

    def wrong(config: DictConfig) -> list[Problem]:
        return [replace(one, fixes=({"steps": -1},)) if one.key == "steps" else one for one in right(config)]

    assert failures(examine, ["mode=plan", "steps=0", "warmup=-1"]) == []
    monkeypatch.setattr(values, "problems", wrong)
    found = failures(examine, ["mode=plan", "steps=0", "warmup=-1"])
    assert len(found) == 2 and "steps -1   must be at least 1" in found[0], "the second with the first fix of the first"


def test_a_fix_for_a_key_that_does_not_exist_is_found(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    right = prepare.engine_support.early
    wrong = {"mesh.pipelines": 2}
    monkeypatch.setattr(
        prepare.engine_support, "early", lambda *given: [replace(one, fixes=(wrong,)) for one in right(*given)]
    )
    (found,) = failures(examine, ["mode=plan", "mesh.pipeline=16"])
    assert "mesh.pipelines   is not a key of mesh" in found
