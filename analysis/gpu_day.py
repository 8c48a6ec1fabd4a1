"""`make gpu`: what to measure on a machine with GPUs, in half an hour, and a report that says what to commit.

    make gpu                       on the GPUs of this machine, about 30 minutes
    make gpu ARGS="--dry-run"      the same on CPU devices with small models, in minutes: does the kit itself work?

The tests marked `gpu` run under CUDA's sanitizer of torch, which finds kernels of two streams that are not ordered.
Then: the machine and its collectives, profiles, races of all engines, the memory of torchgpipe's first U-Nets, Myelin's
offloading, and the networks that the planners' papers have. One job runs at a time; one that fails ends no other, and
none begins when the time is over. Untested: this has run on no GPU so far.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from analysis import jobs, pack, records
from analysis.jobs import Ended, Job
from harness.core import files, units
from harness.core.problem import CannotRun
from harness.host import devices

ENGINES = "single,gpipe,torch_pipelining,pipeline,myelin,periodic,ddp,fsdp,sbp,deepspeed"
PROFILED = ("unet_5_64", "gpt_110m", "amoebanet_18_208", "resnet101_1000")
NETWORKS = ("resnet50_1000", "inception_v3_1000", "densenet121_1000")
"""MadPipe's."""
RACES = {
    "unet_5_64": ("batch.size=32",),
    "gpt_110m": ("batch.size=32", "precision=mixed"),
    "amoebanet_18_208": ("batch.size=64",),
}
OFFLOADING = (
    "engine=myelin",
    "engine.transport=torch",
    "engine.offload=false,true",
    "cluster.devices=1",
    "batch.size=8",
)
GPU_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "gpu", "tests")
SHOWN_LINES = 30


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if all jobs ended well, 1 if one failed or was left out, 2 without a GPU."""
    parser = argparse.ArgumentParser("python -m analysis.gpu_day", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="small models on two CPU devices, without the gpu tests")
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no job begins or goes on (30)")
    parser.add_argument("--out", type=Path, help="the folder, by default runs/gpu-DATE")
    asked = parser.parse_args(arguments)
    gpus = devices.detect("cuda")
    if not gpus.count and not asked.dry_run:
        print("torch sees no GPU here   -> --dry-run tries the kit on CPU devices", file=sys.stderr)
        return 2
    out = (asked.out or Path("runs") / time.strftime("gpu-%Y%m%d-%H%M%S")).resolve()
    ended = within(planned(out, min(gpus.count, 8), asked.dry_run), asked.minutes * 60, out / "logs")
    archived = _archived(out)
    files.write_text(out / "report.md", report(ended, archived, out, "CPU devices" if asked.dry_run else gpus.name))
    print(f"written to {out / 'report.md'}")
    return 0 if all(one.ok for one in ended) else 1


def planned(out: Path, gpus: int, dry: bool) -> list[Job]:
    """Return the jobs, the most important first."""
    here = ("tracker=none", f"cluster.device={'cpu' if dry else 'cuda'}")
    many = (*here, f"cluster.devices={2 if dry else gpus}")
    found = [
        _run("calibration", out, "mode=calibrate", *many),
        _run("profiles", out, "-m", "mode=profile", *here, _models(dry, *PROFILED), "batch.size=8"),
        *_races(out, dry, many),
        *(_run(f"memory {name}", out, *here, "cluster.devices=1", "steps=2", *keys) for name, keys in _unets(dry)),
        _run("offloading", out, "-m", *here, *OFFLOADING, f"model={'gpt' if dry else 'gpt_110m'}"),
        _run("networks", out, "-m", "mode=profile", *here, _models(dry, *NETWORKS), "batch.size=8"),
    ]
    return found if dry else [Job("tests", GPU_TESTS, environment={"TORCH_CUDA_SANITIZER": "1"}), *found]


def _run(name: str, out: Path, *keys: str) -> Job:
    return Job(name, ("run.py", *keys, f"out={out / name.replace(' ', '-')}"))


def _models(dry: bool, *names: str) -> str:
    """Return the key for several models; in a dry run the small ones of the same kinds."""
    small = dict.fromkeys(re.split(r"[\d_]", name)[0] for name in names)
    return f"model={','.join(small if dry else names)}"


def _races(out: Path, dry: bool, keys: Sequence[str]) -> Iterator[Job]:
    for model, of_model in {"gpt": ("batch.size=8",)}.items() if dry else RACES.items():
        name, *_ = re.split(r"[\d_]", model)
        engines, minutes = ("single,gpipe,ddp", 0.1) if dry else (ENGINES, 1.5)
        own = (f"engine={engines}", f"model={model}", "batch.micro_batches=4", f"race.minutes={minutes}", *of_model)
        yield _run(f"race {name}", out, "mode=race", *keys, *own)


def _unets(dry: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield torchgpipe's U-Nets on one device (Table 3), without a pipeline and with; small ones in a dry run."""
    models, size = (("unet", "unet"), 4) if dry else (("unet_6_72", "unet_11_128"), 32)
    for name, engine, model, count in zip(
        ("Naive-1", "Pipeline-1"), ("single", "gpipe"), models, (1, size), strict=True
    ):
        yield name, (f"engine={engine}", f"model={model}", f"batch.size={size}", f"batch.micro_batches={count}")


def within(wanted: Sequence[Job], seconds: float, logs: Path) -> list[Ended]:
    """Run the jobs one after the other, all of them within so many seconds."""
    end_s, ended = time.monotonic() + seconds, []
    for job in wanted:
        left_s = end_s - time.monotonic()
        if left_s > 0:
            ended += jobs.run([replace(job, limit_s=left_s)], 1, logs)
        else:
            ended.append(Ended(job, "left out, the time was over", 0.0, jobs.log_of(job, logs)))
    return ended


def _archived(out: Path) -> list[Path]:
    """Archive the records of each folder in `records`; returns the files."""
    found = []
    for folder in sorted(one for one in out.glob("*") if one.name != "calibration" and records.in_folder(one)):
        try:
            found.append(pack.write(folder, out / "records")[0])
        except CannotRun as error:
            print(error, file=sys.stderr)
    return found


def report(ended: Sequence[Ended], archived: Sequence[Path], out: Path, device: str) -> str:
    """Return the report as Markdown: how each job ended, the end of what it printed, and what to commit."""
    rows = [f"| {one.job.name} | {one.how} | {units.seconds(one.seconds)} |" for one in ended]
    commit = [f"* `{path.relative_to(out)}`: into analysis/results/records/" for path in archived]
    for path in out.glob("*/cluster/*.yaml"):
        commit.append(f"* `{path.relative_to(out)}`: into conf/cluster/, under a name of its own")
    commit.append("* this report: docs/results/gpu.md; docs/reference/engines.md says which GPUs have been seen")
    printed = [f"## {one.job.name}\n\n```text\n{_tail(one.log)}\n```\n" for one in ended if one.log.is_file()]
    title = f"# {device}, {time.strftime('%Y-%m-%d')}\n"
    return "\n".join([title, "| job | ended | time |\n|---|---|---|", *rows, "\n## To commit\n", *commit, "", *printed])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
