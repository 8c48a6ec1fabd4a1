"""The tables of problems that each command prints, as text: tests/golden/problems holds one file for each command.

All other tests assert keys, values and fixes. To write the files again:

    REGATTA_GOLDEN=write python -m pytest tests/test_problem_texts.py
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

import run
from harness.core.cluster import Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.record import EXIT_CODES
from harness.host import devices, machine
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from slurm import partition, submit

GOLDEN = Path(__file__).parent / "golden" / "problems"
HERE = DetectedDevices("cpu", "a CPU", 2, 16 * 10**9)
MACHINE = Machine(Device(HERE.name, 8 * 10**9, {"float32": 1e12}, 1e10), Link(1e-5, 1e-9), None, 2.0, 2.0)
LAYER = LayerProfile("layer", 0.01, 0.02, param_bytes=10**7, output_bytes=10**6, saved_bytes=10**7)
PROFILE = ModelProfile((LAYER,) * 8, "unet_x", 1, input_bytes=1000, source="measured on a CPU")
FLAT = "cluster=flat cluster.devices=2 cluster.bandwidth_gb_s=1 profile=p.json"
PARTITION = partition.Partition("debug", 4, 8, 16000, 2, "2:00:00", True, True)
COMMANDS = {
    "run": [
        "steps=0 batch.micro_batch=4 optimizer.lr=x precision=fp33",
        "costs=cheap batch.size=0 tracker=wandb tracker.mode=of",
        "cluster=summit mesh.pipeline=9 mesh.data=2 precision=fp16 batch.micro_batches=3 planner=autoddl",
        "model=gpt data=images engine=deepspeed engine.zero=2 mesh.pipeline=2 launch.ranks=srun",
        "profile=p.json",
        "engine=ddp launch.sharded_checkpoints=true precision.cuda_graphs=true",
        "engine=zero3 global_batch_size=32 micro_batch_size=3 tp=2 lr=x num_layers=3",
        "help",
        "~seed +steps=3 ~steps engine@foo=gpipe +engine=gpipe hydra.run.dir=x steps=1,2",
    ],
    "plan": [
        f"mode=plan {FLAT} cluster.memory_gb=0.15",
        f"mode=plan {FLAT} cluster.memory_gb=0.05 engine=periodic planner=madpipe",
        f"mode=plan {FLAT} cluster.memory_gb=1 planner=given planner.balance=[4,3]",
        f"mode=plan {FLAT} cluster.memory_gb=1 planner=megatron engine=sbp",
    ],
    "simulate": [
        "mode=simulate costs=scaled cluster.device=tpu cluster.nodes=2",
        f"mode=simulate {FLAT} cluster.memory_gb=1 batch.size=30 batch.micro_batches=4 costs=analytic",
    ],
    "tune": [
        f"mode=tune {FLAT} cluster.memory_gb=0.05",
        "mode=tune engine=single mesh.pipeline=2 batch.size=7 profile=p.json",
    ],
    "profile": ["mode=profile batch.size=7 costs=scaled", "mode=profile profile=nowhere.json model.chanels=3"],
    "calibrate": ["mode=calibrate cluster=flat", "mode=calibrate cluster.devices=1 cluster.alpha_s=1"],
    "sweep": [
        "-m +sweeps=smoke scale=tiny",
        "-m steps=1,2 scale=paper",
        "-m steps=1,2 batch.sise=3",
        "-m steps=range(3,3)",
    ],
    "submit": [
        "steps=1,2 slurm.nodes=0 slurm.cpu=3 slurm.time=never slurm.mem=4X",
        "steps=1,2 slurm.nodes=9 slurm.tasks=16 slurm.gpus=4 slurm.time=4:00:00 slurm.mem=32G",
    ],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two cores that has been measured, in an empty folder with a profile."""
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": HERE)
    monkeypatch.setattr(devices, "cores", lambda: HERE.count)
    monkeypatch.setattr(partition, "partitions", lambda: [PARTITION])
    monkeypatch.chdir(tmp_path)
    machine.store(MACHINE)
    PROFILE.save(Path("p.json"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_tables_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, main = ("slurm.submit", submit.main) if command == "submit" else ("run.py", run.main)
    texts = []
    for typed in COMMANDS[command]:
        arguments = [*shlex.split(typed), "out=runs/x"]
        assert main(arguments) == EXIT_CODES["infeasible"], typed
        table = capsys.readouterr().err.splitlines()
        first = next(number for number, text in enumerate(table) if text.endswith(" cannot run:"))
        texts.append("\n".join([f"$ {program} {typed}", *table[first:]]))
    found, golden = "\n\n".join(texts) + "\n", GOLDEN / f"{command}.txt"
    if os.environ.get("REGATTA_GOLDEN") == "write":
        golden.write_text(found)
    assert found == golden.read_text()
