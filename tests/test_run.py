"""The front door, as a user meets it: exit codes, and messages in place of tracebacks."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import run
from harness.cli.compose import compose
from harness.config import registry
from harness.config.key_names import leaves
from harness.config.overrides import quoted
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
    done = without_torch("--help", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    fixed = {f"{group}.name" for group in (*registry.FOLDERS, *registry.SCHEMAS)}
    for key in set(leaves(compose([]))) - fixed:
        assert f"    {key}=" in done.stdout
    assert "    engine.threads=" in done.stdout, "keys of a choice that is not the default"
    words = " ".join(done.stdout.split())
    assert "samples of one optimizer step, over all replicas. (a whole number)" in words
    assert "unet_5_64 U-Net (5, 64), 232,687,328 parameters" in words


@pytest.mark.parametrize("mode", ["race", "tune"])
def test_cfg_of_several_runs_starts_none(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.main(["--cfg", "job", f"mode={mode}", "engine=single,ddp", "model=mlp"], {}) == 2
    assert "gives several values" in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("mode", "said"), [("rac", "-> mode=race"), ("pla", "-> mode=plan")])
def test_a_mode_that_is_none(mode: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([f"mode={mode}"], {}) == 2
    assert "tune, race" in (printed := capsys.readouterr().err) and said in printed


def test_cfg_prints_what_would_run(tmp_path: Path) -> None:
    done = without_torch("--cfg", "job", "engine=single", "batch.size=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert OmegaConf.create(done.stdout) == OmegaConf.to_container(compose(["engine=single", "batch.size=4"]))


@pytest.mark.usefixtures("commands")
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


@pytest.mark.parametrize("folder", ["own", "", "x" * 5000])
def test_a_further_folder_that_is_not_there(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--config-dir", folder, "--cfg", "job"], {}) == 2
    assert capsys.readouterr().err.startswith("this run cannot run:\n  --config-dir")


def further(folder: Path, group: str, content: bytes | None) -> list[str]:
    """A folder of choices with the file z.yaml; a FIFO without content."""
    path = folder / "own" / group / "z.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content) if content is not None else os.mkfifo(path)
    return ["--config-dir", str(folder / "own")]


@pytest.mark.parametrize("group", ["cluster", "model", "engine"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"devices: 4", b"", b"- 1", b"3", b"defaults: 3", b"defaults: [[]]", b"defaults: [_self_]", b"defaults: [z]"),
        *(
            b"defaults: [_nothere, _self_]",
            b"# @package\ndefaults: []",
            b"\xff\xfe",
            b"a: [",
            b"a: &a [*a]",
            b"[" * 5000,
        ),
        *(b"a: !!python/object/apply:os.system [true]", b"defaults: [{a: 3}]", b"x: " + b"1" * 5000, b"\0", None),
    ],
)
def test_a_file_of_the_user_that_is_no_choice_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    group: str,
    content: bytes | None,
) -> None:
    monkeypatch.setenv(registry.FURTHER, "")  # which --config-dir sets, and monkeypatch takes back
    assert run.main([*further(tmp_path, group, content), "--cfg", "job", f"{group}=z"], {}) == 2
    named = f"{group} z " if content is None else f"own/{group}/z.yaml"
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "override", "named"),
    [
        ("planner", "{override /planner: z}", "based on it"),
        ("planner", "{override /engine: nothere}", "none of its choices"),
        ("planner", f"{{override /engine: {'x' * 300}}}", "none of its choices"),
        ("engine", "{override /planner: uniform}", "can override"),
    ],
)
def test_an_override_that_cannot_be_is_named_with_its_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    group: str,
    override: str,
    named: str,
) -> None:
    monkeypatch.setenv(registry.FURTHER, "")
    schema = {"planner": "_balance@planner", "engine": "_gpipe@engine"}[group]
    text = f"defaults: [{schema}, _self_, {override}]"
    folder = further(tmp_path, group, f"# @package _global_\n{text}".encode())
    assert run.main([*folder, "--cfg", "job", f"{group}=z"], {}) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{group}/z.yaml" in error and named in error
    (tmp_path / "own" / group / "z.yaml").write_text(text.replace(f"@{group}", ""))
    assert run.main([*folder, "--cfg", "job", f"{group}=z"], {}) == 2
    assert "-> # @package _global_" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "text", "named"),
    [
        ("model", "defaults: [_mlp, _self_]\nname: gpt", "model z"),
        ("data", "defaults: [_synthetic, _self_]\nname: ${name}", "data z"),
        ("planner", "# @package _global_\ndefaults: [balance@engine, _self_]", "-> balance@planner"),
        ("cluster", "defaults: [_cluster@cluster, _self_]", "-> _cluster"),
        ("cluster", f"defaults: [{'x' * 300}, _self_]", "/cluster/z.yaml"),
        ("cluster", "# @package _global_\ndefaults: [_cluster, _self_]", "/cluster/z.yaml"),
        ("cluster", "# @package _global_\ndefaults: [_cluster@steps, _self_]", "/cluster/z.yaml"),
        ("cluster", "defaults: [_cluster, _self_]\ndevices: x", "/cluster/z.yaml"),
        ("model", "defaults: [_mlp, _self_]\nwidths: [8, [8]]", "model.widths"),
        ("model", "defaults: [_mlp, _self_]\nwidths: [8, 1000000000000000000000000000000]", "model.widths"),
    ],
)
def test_a_choice_that_does_not_fit_its_group_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    group: str,
    text: str,
    named: str,
) -> None:
    monkeypatch.setenv(registry.FURTHER, "")
    assert run.main([*further(tmp_path, group, text.encode()), "--cfg", "job", f"{group}=z"], {}) == 2
    assert named in capsys.readouterr().err


def test_a_choice_may_be_based_on_another_one(tmp_path: Path) -> None:
    own = further(tmp_path, "model", b"defaults: [gpt_12b, _self_]\nlayers: 2")
    done = without_torch(*own, "--cfg", "job", "model=z", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert OmegaConf.create(done.stdout).model.hidden == 4512 and OmegaConf.create(done.stdout).model.layers == 2


@pytest.mark.parametrize(
    "content", [b"- a", b"3", b"points: 3", b"grid: {steps: []}", b"scales: {a: 1}", b"\xff", b"["]
)
def test_a_sweep_of_the_user_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    monkeypatch.setenv(registry.FURTHER, "")
    assert run.main([*further(tmp_path, "sweeps", content), "-m", "+sweeps=z", f"out={tmp_path}/out"], {}) == 2
    assert "own/sweeps/z.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.widths=[8,[8]]", "model.widths"),
        ("model.widths=[8,${model.widths}]", "model.widths"),
        ("steps=" + "1" * 30, "steps"),
        ("optimizer.lr=" + "1" * 400, "optimizer.lr"),
        ("batch.micro_batches=1000000000", "batch.micro_batches"),
        ("cluster.devices=1000000000", "cluster.devices"),
        ("launch.timeout_s=1e300", "launch.timeout_s"),
        ("model.widths=" + "[" * 2000 + "]" * 2000, "model.widths"),
    ],
)
def test_a_value_that_no_run_can_have_is_named(capsys: pytest.CaptureFixture[str], override: str, key: str) -> None:
    assert run.main(["mode=plan", "engine=single", "model=mlp", override], {}) == 2
    assert f"  {key}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert run.main(["mode=plan", "engine=single", "model=mlp", f"out={tmp_path}"], {}) == 2
    assert "  out " in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("argparse", "SIGINT"),
        ("harness.core.problem", "SIGTERM"),
        ("omegaconf", "SIGINT"),
        ("hydra.core", "SIGHUP"),
        ("harness.run.runner", "SIGTERM"),
    ],
)
def test_a_signal_in_the_imports_is_a_line(tmp_path: Path, module: str, name: str) -> None:
    """Of the interpreter's option that names each module when its import has ended, which this reads a little later."""
    command = [sys.executable, "-X", "importtime", str(registry.ROOT / "run.py"), "mode=plan", "engine=single"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stderr
            for line in process.stderr:
                if line.rpartition("|")[2].strip() == module:
                    process.send_signal(signal.Signals[name])
                    break
            rest = process.stderr.read()
        finally:
            process.kill()
    assert "Traceback" not in rest
    (said,) = [line for line in rest.splitlines() if "|" not in line]
    before, within = f"ended by {name}", f"engine=single model=unet: preempted: ended by {name}"
    assert (process.returncode, said) in ((128 + signal.Signals[name], before), (130, within))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_after_the_end_of_a_run_does_not_change_how_it_ended(tmp_path: Path, name: str) -> None:
    late = f"import atexit, os, runpy, signal, sys\natexit.register(os.kill, os.getpid(), signal.{name})\n"
    late += (
        f"sys.argv = ['run.py', '--cfg', 'job']; runpy.run_path({str(registry.ROOT / 'run.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", late], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_mistakes_are_reported_all_at_once(tmp_path: Path) -> None:
    done = start("engine=gpip", "batch.sise=3", "steps=0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    title, *lines = done.stderr.splitlines()
    assert title == "engine=gpip batch.sise=3 steps=0 cannot run:"
    subjects = [line.split("  ")[1] for line in lines if not line.startswith("   ")]
    assert subjects == ["engine gpip", "batch.sise", "steps 0"]
    fixes = [line.partition("-> ")[2] for line in lines if "-> " in line]
    assert fixes == ["engine=gpipe", "batch.size=3 without batch.sise", "steps=1"]
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_an_unknown_option(tmp_path: Path) -> None:
    done = start("--gpus", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "unrecognized arguments: --gpus" in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_with_dashes_and_the_word_help(tmp_path: Path) -> None:
    done = start("--engine", "gpipe", "--model", "unet", cwd=tmp_path)
    assert done.returncode == 2
    assert "unrecognized arguments: --engine" in done.stderr
    assert "python run.py engine=gpipe model=unet" in done.stderr.splitlines()[-1]
    assert "-> python run.py --help" in start("help", cwd=tmp_path).stderr


def test_help_of_a_group_and_of_a_word_that_is_none(tmp_path: Path) -> None:
    done = without_torch("--help", "planner", cwd=tmp_path)
    assert done.returncode == 0 and "    planner.by=" in done.stdout and "    engine.streams=" not in done.stdout
    wrong = without_torch("--help", "gpipe", cwd=tmp_path)
    assert wrong.returncode == 2 and "-> python run.py engine=gpipe --help" in wrong.stderr


def test_help_of_a_choice(tmp_path: Path) -> None:
    done = without_torch("engine=gpipe", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "    engine.streams=true" in done.stdout and "    planner.by=" not in done.stdout


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


@pytest.mark.usefixtures("commands")
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
    assert "engine.sped is not a key" in done.stderr
    assert "Traceback" not in done.stderr

    (tmp_path / "engines" / "rocket.py").write_text(PLUGIN.replace("NAME", "racket"))
    done = start("--cfg", "job", root=tmp_path)
    assert done.returncode == 2
    assert 'Config must be a dataclass that begins with name: str = "rocket"' in " ".join(done.stderr.split())


def test_a_python_without_the_dependencies_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hydra", None)
        patch.delitem(sys.modules, "harness.cli.compose", raising=False)
        assert run.main(["mode=plan"], {}) == 2
    assert "lacks hydra -> make setup" in capsys.readouterr().err


def test_a_working_directory_that_is_gone_is_said(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run.main(["engine=single", "mode=plan"], {}) == 2
    assert "the working directory   is gone" in capsys.readouterr().err
