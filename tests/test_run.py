"""The front door, as a user meets it: exit codes, and messages in place of tracebacks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import run
from harness.cli.compose import compose
from harness.config import registry
from harness.config.overrides import leaves, quoted
from harness.core.model_profile import LayerProfile, ModelProfile

NO_TORCH = """
import sys
import run
code = run.main(sys.argv[1:])
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""


def start(*arguments: str, root: Path = registry.ROOT, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / "run.py"), *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


def without_torch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-c", NO_TORCH, *arguments]
    path = {"PYTHONPATH": str(registry.ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run(code, capture_output=True, text=True, cwd=cwd, env=path, check=False)


def test_help_has_every_key_every_choice_and_their_meaning(tmp_path: Path) -> None:
    done = without_torch("--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fixed = {f"{group}.name" for group in (*registry.FOLDERS, *registry.SCHEMAS)}
    for key in set(leaves(compose([]))) - fixed:
        assert f"    {key}=" in done.stdout
    assert "    engine.threads=" in done.stdout, "keys of a choice that is not the default"
    words = " ".join(done.stdout.split())
    assert "Samples of one optimizer step, over all replicas. (a whole number)" in words
    assert "unet_5_64 U-Net (5, 64), 232,687,328 parameters" in words


def test_cfg_prints_what_would_run(tmp_path: Path) -> None:
    done = without_torch("--cfg", "job", "engine=single", "batch.size=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert OmegaConf.create(done.stdout) == OmegaConf.to_container(compose(["engine=single", "batch.size=4"]))


def test_a_further_folder_of_choices(tmp_path: Path) -> None:
    """Also for the points of a sweep."""
    (tmp_path / "own" / "cluster").mkdir(parents=True)
    own = "# Mine.\ndefaults: [_cluster, _self_]\nname: mine\ndevices: 3\nmemory_gb: 1\nbandwidth_gb_s: 2\n"
    (tmp_path / "own" / "cluster" / "mine.yaml").write_text(own)
    done = without_torch("--config-dir", "own", "--cfg", "job", "cluster=mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert OmegaConf.create(done.stdout).cluster.devices == 3
    assert without_torch("--cfg", "job", "cluster=mine", cwd=tmp_path).returncode == 2
    swept = without_torch("--config-dir", "own", "-m", "cluster=mine,flat", "costs=measured", cwd=tmp_path)
    assert "runs need cluster=local" in swept.stdout + swept.stderr
    assert "is not one of" not in swept.stdout + swept.stderr


def test_a_further_folder_that_is_not_there(tmp_path: Path) -> None:
    done = without_torch("--config-dir", "own", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("this run cannot run:\n  --config-dir own   ")


def test_mistakes_are_reported_all_at_once(tmp_path: Path) -> None:
    done = start("engine=gpip", "batch.sise=3", "steps=0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    title, *lines = done.stderr.splitlines()
    assert title == "engine=gpip batch.sise=3 steps=0 cannot run:"
    assert [line.split("  ")[1] for line in lines] == ["engine gpip", "batch.sise", "steps 0"]
    assert [line.partition("   -> ")[2] for line in lines] == [
        "engine=gpipe", "batch.size=3 without batch.sise", "steps=1",
    ]  # fmt: skip
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_an_unknown_option(tmp_path: Path) -> None:
    done = start("--gpus", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "unrecognized arguments: --gpus" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_from_a_stored_profile_needs_no_torch(tmp_path: Path) -> None:
    layer = LayerProfile("l", forward_s=1e-3, backward_s=2e-3, param_bytes=4, output_bytes=4, saved_bytes=4)
    profile = ModelProfile((layer,) * 4, model="unet", micro_batch=2, dtype="float32", input_bytes=4, source="a test")
    profile.save(tmp_path / "p.json")
    done = without_torch("mode=plan", "profile=p.json", "tracker=none", quoted("out", "a b"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a b" / "plan.json").exists()


def test_a_sweep_with_nothing_to_run(tmp_path: Path) -> None:
    done = start("-m", "mode=plan", "steps=0,-1", "tracker=none", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "2 points: 2 infeasible (runs/" in done.stdout
    assert len(list(tmp_path.glob("runs/*/*/record.json"))) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "2"),
        ("PMI_SIZE", "4"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("SLURM_STEP_NUM_TASKS", "8"),
        ("SLURM_PROCID", "1"),
    ],
)
def test_inside_a_step_of_several_ranks(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--cfg", "job"], {name: value}) == 2
    reported = capsys.readouterr()
    assert f"{name} {value}   says that this is one of several ranks" in reported.err
    assert "-> python run.py ... without srun or mpiexec" in reported.err
    assert reported.out == ""


def test_alone_in_a_job_of_several_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    batch_step = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "WORLD_SIZE": "1"}
    assert run.main(["--cfg", "job"], batch_step) == 0
    assert capsys.readouterr().out.startswith("engine:\n")


PLUGIN = '''
from dataclasses import dataclass

@dataclass
class Config:
    name: str = "NAME"
    """The engine."""
    speed: int = 1
    """How fast."""

def build(config: Config) -> object:
    import torch
'''


def test_a_new_engine_is_one_module_and_one_yaml(tmp_path: Path) -> None:
    for part in ("harness", "engines", "planners", "models", "conf"):
        shutil.copytree(registry.ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(registry.ROOT / "run.py", tmp_path)
    (tmp_path / "engines" / "rocket.py").write_text(PLUGIN.replace("NAME", "rocket"))
    (tmp_path / "conf" / "engine" / "rocket.yaml").write_text("# Fast.\ndefaults: [_rocket, _self_]\nspeed: 5\n")
    done = start("--cfg", "job", "engine=rocket", root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert OmegaConf.create(done.stdout).engine == {"name": "rocket", "speed": 5}

    done = start("--cfg", "job", "engine=rocket", "engine.speed=very", root=tmp_path)
    assert "  engine.speed very   " in done.stderr and "-> engine.speed=5" in done.stderr

    (tmp_path / "conf" / "engine" / "rocket.yaml").write_text("defaults: [_rocket, _self_]\nsped: 5\n")
    done = start("--cfg", "job", "engine=rocket", root=tmp_path)
    assert done.returncode == 2
    assert "Key 'sped' not in 'Config'" in done.stderr
    assert "Traceback" not in done.stderr

    (tmp_path / "engines" / "rocket.py").write_text(PLUGIN.replace("NAME", "racket"))
    done = start("--cfg", "job", root=tmp_path)
    assert done.returncode == 2
    assert 'Config must be a dataclass that begins with name: str = "rocket"' in done.stderr
