"""`make gpu`: its commands exist, end within the time, and leave a report that says what to commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import gpu_day
from analysis.jobs import Job
from harness.cli.compose import compose
from harness.sweep.points import expand


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.usefixtures("computation")
def test_every_command_has_keys_and_values_that_exist(tmp_path: Path, dry: bool) -> None:
    jobs = gpu_day.planned(tmp_path, 4, dry)
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        script, *keys = job.arguments
        if script != "run.py":
            assert job.name == "tests" and not dry
        elif keys[0] == "-m":
            assert expand(keys[1:])
        else:
            own = [key for key in keys if not key.startswith(("mode=", "engine="))]
            engines = [key for key in keys if key.startswith("engine=")] or ["engine=gpipe"]
            for engine in engines[0].removeprefix("engine=").split(","):
                others = [key for key in own if not key.startswith("race.")]
                assert compose([f"engine={engine}", *others]).cluster.device == ("cpu" if dry else "cuda")


def test_jobs_that_have_no_time_are_left_out(tmp_path: Path) -> None:
    jobs = [Job("long", ("-c", "import time; time.sleep(60)")), Job("never", ("-c", ""))]
    first, second = gpu_day.within(jobs, 0.3, tmp_path)
    assert first.how.startswith("not ended within") and second.how.startswith("left out")
    text = gpu_day.report([first, second], [tmp_path / "records" / "a.jsonl.gz"], tmp_path, "H100")
    assert "| never | left out, the time was over |" in text
    assert "* `records/a.jsonl.gz`: into analysis/results/records/" in text


def test_without_a_gpu_it_says_what_can_be_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_day.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.usefixtures("commands", "fork_server")
@pytest.mark.timeout(600)
def test_the_kit_runs_on_cpu_devices(tmp_path: Path) -> None:
    assert gpu_day.main(["--dry-run", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert text.count("| ok |") == len(gpu_day.planned(tmp_path, 2, True))
    assert {path.name for path in (tmp_path / "records").iterdir()} >= {"race-gpt.jsonl.gz", "offloading.jsonl.gz"}
    assert (tmp_path / "calibration" / "cluster" / "calibrated.yaml").is_file()
