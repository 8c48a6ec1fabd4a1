"""How the points of a sweep run: here runs that only plan, in this process, and stand-ins for run.py in others."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from harness.cli.compose import compose
from harness.config import registry
from harness.config.overrides import quoted
from harness.core import files, run_files
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun
from harness.core.record import RunRecord, Source, Status
from harness.run.folder_lock import Busy, held
from harness.sweep import local
from harness.sweep import run_point as sweep_run_point
from harness.sweep.points import Point, expand, refuse_mistyped
from harness.sweep.row import Row
from tests.problems import refused, rows
from tests.support.lock_holder import holder


def test_the_folder_says_the_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("scales: {a: {points: [[steps=0]]}, b: {points: [[steps=-1]]}}")
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert local.main(["+sweeps=mine", "scale=b"]) == 1
    assert local.main(["+sweeps=mine"]) == 1
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine-a", "mine-b"]


@pytest.mark.parametrize(
    ("typed", "found", "hint"),
    [
        (["batch.mirco_batches=2,4"], ("batch.mirco_batches", None, []), "batch.micro_batches=..."),
        (["batch.size=many", "seed=1,2"], ("batch.size", "many", ["batch.size=16"]), ""),
        (["batch.size=many,more"], ("batch.size", None, []), "batch.size=..."),
        (["engine=gpip", "seed=1,2"], ("engine", "gpip", ["engine=gpipe"]), ""),
    ],
)
def test_what_is_mistyped_in_all_points_leaves_nothing(tmp_path: Path, typed: list[str], found: Row, hint: str) -> None:
    with pytest.raises(CannotRun) as caught:
        local.main([*typed, f"out={tmp_path / 'out'}"])
    assert rows(refused(caught)) == [found] and refused(caught)[0].hint == hint
    assert not list(tmp_path.iterdir())


def test_a_choice_that_is_none_is_refused_whoever_has_it() -> None:
    with pytest.raises(CannotRun) as caught:
        refuse_mistyped(expand(["engine=single,dpp,gpip", "model=mlp,nosuch"]))
    found = {(one.key, one.value) for one in refused(caught)}
    assert found == {("engine", "dpp"), ("engine", "gpip"), ("model", "nosuch")}
    with pytest.raises(CannotRun) as caught:
        refuse_mistyped(expand(["engine='dpp',gpip"]))
    assert [(one.key, one.value.strip("'")) for one in refused(caught)] == [("engine", "dpp"), ("engine", "gpip")]
    with pytest.raises(CannotRun, match="dgx_a100-80"):
        refuse_mistyped(expand(["cluster=dgx_a100-80,local"]))
    refuse_mistyped(expand(["engine='single',ddp", "model=no/such.py:build,mlp"]))  # a file is looked for by its points


def test_what_is_mistyped_in_some_points_is_theirs() -> None:
    refuse_mistyped(expand(["engine=gpipe,single", "engine.portals=true"]))
    refuse_mistyped(expand(["batch.size=a,8"]))


@pytest.mark.parametrize(
    ("status", "source", "code"),
    [
        ("ok", "measured", 0),
        ("ok", "simulated", 0),
        ("infeasible", "simulated", 0),
        ("infeasible", "measured", 1),
        ("error", "simulated", 1),
        ("oom", "measured", 1),
    ],
)
def test_what_a_sweep_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: Status, source: Source, code: int
) -> None:
    def run_point(row: Row, *_: object, **__: object) -> None:
        row.record = RunRecord("x", status if "steps=2" in row.point.overrides else "ok", source)

    monkeypatch.setattr(sweep_run_point, "run_point", run_point)
    assert local.main(["steps=1,2", f"out={tmp_path}"]) == code
    stored = csv.DictReader((tmp_path / run_files.TABLE).read_text().splitlines())
    assert [row["status"] for row in stored] == ["ok", status]


def test_a_folder_that_takes_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / run_files.TABLE).mkdir()
    monkeypatch.setattr(sweep_run_point, "run_point", lambda *_, **__: None)
    with pytest.raises(CannotRun, match="cannot be written"):
        local.main(["steps=1", f"out={tmp_path}"])


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A stored profile, in a folder that a shell would stumble over."""
    layer = LayerProfile("l", forward_s=1e-3, backward_s=2e-3, param_bytes=4, output_bytes=4, saved_bytes=4)
    path = tmp_path / "it's $(touch hacked); a b" / "p.json"
    path.parent.mkdir()
    ModelProfile((layer,) * 4, model="unet", micro_batch=2, dtype="float32", input_bytes=4, source="a test").save(path)
    return path


def no_process(*_: object) -> int:
    raise AssertionError("a run that only plans needs no process of its own")


def test_a_sweep_and_its_second_start(
    tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_run_point, "_execute", no_process)
    typed = ["mode=plan", "tracker=none", "batch.micro_batches=8,0,7", quoted("profile", str(profile)), "out=here"]
    assert local.main([*typed, "batch.size=16"]) == 1, "one point is wrong"
    points = expand([*typed, "batch.size=16"])
    records = [RunRecord.load(tmp_path / "here" / point.id / "record.json") for point in points]
    assert [record.status for record in records] == ["ok", "infeasible", "infeasible"]
    assert "batch.micro_batches 0   " in records[1].reason, "found before anything starts"
    assert "2.28571" in records[2].reason, "by its profile"
    assert [record.source for record in records[1:]] == ["measured", "simulated"], "the first could not even be read"
    assert records[0].manifest["overrides"] == [*points[0].overrides, quoted("out", f"here/{points[0].id}")]
    printed = capsys.readouterr()
    assert "3 points: 1 ok, 2 infeasible (here)" in printed.out
    consoles = [tmp_path / "here" / point.id / sweep_run_point.CONSOLE for point in points]
    assert "predicted: " in consoles[0].read_text()
    assert "predicted: " not in printed.out + printed.err, "what a run prints is in its own file"
    assert not consoles[1].exists(), "nothing started"
    assert not list(tmp_path.rglob("hacked"))
    began = (tmp_path / "here" / points[0].id / "record.json").stat().st_mtime_ns
    assert local.main([*typed, "batch.micro_batches=8", "batch.size=16"]) == 0
    assert (tmp_path / "here" / points[0].id / "record.json").stat().st_mtime_ns == began
    assert "1 point: 1 ok; 1 of them done before (here)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "x", "sta',
        '{"id": "x", "status": "ok", "config": {"batch": "big"}}',
        '{"id": "x", "status": "ok", "plan": {"mesh": {"data": "x"}}, "metrics": {"throughput": "fast"}}',
    ],
)
def test_a_record_that_cannot_be_read_is_reported_and_made_again(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    typed = ["mode=plan", "tracker=none", "batch.micro_batches=8", quoted("profile", str(profile)), f"out={tmp_path}"]
    (point,) = expand(typed)
    record = tmp_path / point.id / "record.json"
    record.parent.mkdir()
    record.write_text(text)
    assert local.main(typed) == 0
    reported = f"{point.id} has a record.json that cannot be read, it is run again"
    assert reported in capsys.readouterr().out
    assert RunRecord.load(record).status == "ok"
    assert local.main(typed) == 0
    assert reported not in capsys.readouterr().out


def test_a_run_that_breaks_in_this_process_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(sweep_run_point.runner, "run", broken)
    row = Row(Point.of(["mode=plan"]))
    sweep_run_point.run_point(row, tmp_path / "run")
    assert row.record is not None
    assert (row.record.status, row.record.reason) == ("error", "ZeroDivisionError: of a test")
    assert "Traceback" in (tmp_path / "run" / sweep_run_point.CONSOLE).read_text()


STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
def record(**what):
    folder = Path([a for a in sys.argv if a.startswith("out=")][0][4:].strip("'"))
    (folder / "record.json").write_text(json.dumps({"id": "x", **what}))
"""


def stand_in(root: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """What the sweep starts in place of run.py."""
    (root / "run.py").write_text(STAND_IN + code)
    monkeypatch.setattr(registry, "ROOT", root)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "ended by signal 9 before its record was complete: it printed nothing",
        ),
        ("print('no'); sys.exit(3)", "ended with exit code 3 before its record was complete: no"),
        ("record(status='running'); sys.exit(7)", "ended with exit code 7 before its record was complete"),
    ],
)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_run_that_dies_has_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str, earlier: bool
) -> None:
    stand_in(tmp_path, monkeypatch, code)
    row = Row(Point.of(["steps=1"]))
    if earlier:
        RunRecord("x", "oom", reason="of an earlier start").save(tmp_path / "run" / "record.json")
    sweep_run_point.run_point(row, tmp_path / "run")
    name = "refused.json" if earlier and "running" not in code else "record.json"
    stored = json.loads((tmp_path / "run" / name).read_text())
    assert row.record and row.record.to_json() == stored
    if name == "refused.json":
        assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "oom", "it is kept"
    assert stored["status"] == "error"
    assert stored["manifest"] == ({} if "running" in code else {"overrides": ["steps=1"]}), "what it knew is kept"
    assert stored["reason"].startswith(reason)


INTERRUPTED = """
import sys
from pathlib import Path
from harness.config import registry
from harness.sweep import local, run_point
registry.ROOT = Path(sys.argv[1])
run_point.GRACE_S = 1.0
sys.exit(local.main(["steps=1,2", "launch.grace_s=0", "out=" + sys.argv[2]]))
"""
TIDY = """
def ended(number, frame):
    record(status='preempted', reason=f'as it should be by {signal.Signals(number).name}')
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, ended)
record(status='running')
time.sleep(60)
"""
DEAF = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
record(status='running')
time.sleep(60)
"""


@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("code", "reason", "number"),
    [
        pytest.param(TIDY, "as it should be by SIGINT", signal.SIGINT, id="tidy, SIGINT"),
        pytest.param(TIDY, "as it should be by SIGTERM", signal.SIGTERM, id="tidy, SIGTERM"),
        pytest.param(DEAF, "ended with its sweep", signal.SIGINT, id="deaf, SIGINT"),
    ],
)
def test_an_interrupt_ends_the_run_and_shows_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str, number: signal.Signals
) -> None:
    root = registry.ROOT
    stand_in(tmp_path, monkeypatch, "(Path(__file__).parent / 'pid').write_text(str(os.getpid()))\n" + code)
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root,
    )  # fmt: skip
    while not list(tmp_path.glob("out/*/record.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 130
    assert "2 points: 1 not run, 1 preempted" in output
    assert reason in output
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


PLANNING = """
import sys
from harness.sweep import local as sweep
sys.exit(sweep.main(["mode=plan", "model.size=64", "batch.size=8,16", "out=" + sys.argv[1]]))
"""


def test_an_interrupt_ends_a_run_in_this_process(tmp_path: Path) -> None:
    """It comes while the run waits for its child, which measures the model."""
    environment = os.environ | {"REGATTA_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(registry.ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PLANNING, str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    while not list(tmp_path.glob("out/*/log")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "2 points: 1 not run, 1 preempted" in output
    assert "ended by SIGINT" in output


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotRun, match=r"out .*/file/x\s+cannot\s+be\s+made\s+a\s+folder:\s+Not\s+a\s+directory"):
        local.main(["steps=1", f"out={tmp_path}/file/x"])


def test_a_folder_that_nobody_may_write() -> None:
    with pytest.raises(CannotRun, match=r"out /proc/.* +-> out=DIR"):
        local.main(["steps=1", "out=/proc/sys/sweep"])


def test_a_full_disk_ends_the_sweep_with_a_word(tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_bytes", full)
    typed = ["mode=plan", "tracker=none", quoted("profile", str(profile)), quoted("out", str(tmp_path / "out"))]
    with pytest.raises(CannotRun, match=r"out .* +cannot be written: .*No\s+space\s+left"):
        local.main(typed)
    assert not list((tmp_path / "out").rglob("*.json")), "no half of a record"


def test_each_point_is_composed_once(tmp_path: Path, profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = []

    def counted(overrides: Sequence[str], *rest: Any) -> DictConfig:
        composed.append(overrides)
        return compose(overrides, *rest)

    monkeypatch.setattr(sweep_run_point, "compose", counted)
    typed = ["mode=plan", "tracker=none", "batch.micro_batches=8,4", "seed=1,2", quoted("profile", str(profile))]
    local.main([*typed, f"out={tmp_path / 'out'}"])
    assert sorted(composed) == sorted(point.overrides for point in expand(typed))


COUNTING = """
folder = Path([a for a in sys.argv if a.startswith("out=")][0][4:].strip("'"))
with (folder / "starts").open("a") as starts:
    starts.write("x")
record(status='running')
time.sleep(0.3)
record(status='ok')
"""


@pytest.mark.usefixtures("commands")
def test_two_sweeps_share_the_points_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = registry.ROOT
    stand_in(tmp_path, monkeypatch, COUNTING)
    code = INTERRUPTED.replace("steps=1,2", "steps=range(1,7)")
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(tmp_path / "out")], cwd=root,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert all("6 points: 6 ok" in output for output in outputs)
    assert [path.read_text() for path in tmp_path.glob("out/*/starts")] == ["x"] * 6, "none ran twice"


def test_a_point_that_another_process_runs_is_left_to_it(tmp_path: Path) -> None:
    with holder(tmp_path) as process, pytest.raises(Busy, match=f"process {process.pid} on"):
        sweep_run_point.run_point(Row(Point.of(["mode=plan"])), tmp_path)
    with held(tmp_path):
        pass


def test_the_folder_of_a_run_in_progress_takes_no_sweep(tmp_path: Path) -> None:
    with holder(tmp_path) as process, pytest.raises(CannotRun, match=f"process {process.pid} on") as caught:
        local.make(tmp_path)
    assert rows(refused(caught)) == [("out", str(tmp_path), [f"out={tmp_path}-2"])]
    local.make(tmp_path)


PRINTING = """
console = Path([a for a in sys.argv if a.startswith("out=")][0][4:].strip("'")) / "console"
largest = 0
while (size := console.stat().st_size) >= largest:
    largest = size
    print("y" * 1000, flush=True)
    time.sleep(0.001)
while "are not kept" not in console.read_text():
    time.sleep(0.001)
print("the end")
"""


def test_a_run_that_prints_without_end_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, PRINTING)  # it ends once it has seen its file shortened
    monkeypatch.setattr(sweep_run_point, "CONSOLE_BYTES", 20_000)
    row = Row(Point.of(["steps=1"]))
    sweep_run_point.run_point(row, tmp_path / "run")
    text = (tmp_path / "run" / sweep_run_point.CONSOLE).read_text()
    assert "bytes were printed here and are not kept]" in text
    assert row.record and row.record.reason.endswith("the end"), "what comes last is kept"


def test_a_start_that_ends_at_once_leaves_the_run_that_can_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point,) = expand(["engine=single", "model=mlp", "tracker=none"])
    before = RunRecord("mine", "preempted", reason="before", manifest={"resumed": [3]})
    before.save(tmp_path / "record.json")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-5.pt").touch()
    (tmp_path / sweep_run_point.CONSOLE).write_text("killed")
    monkeypatch.setattr(sweep_run_point, "_execute", lambda *given: -9)
    row = Row(point)
    sweep_run_point.run_point(row, tmp_path)
    assert sweep_run_point.stored(tmp_path) == before
    assert row.record == RunRecord.load(tmp_path / "refused.json")
    assert row.record and (row.record.status, row.record.id) == ("error", point.id)
    assert "ended by signal 9" in row.record.reason
    assert (tmp_path / "checkpoints" / "step-5.pt").exists()


def test_a_sweep_in_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    for name in ("record.json", ".lock"):
        (tmp_path / name).touch()
    with pytest.raises(CannotRun):
        local.make(tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
    with pytest.raises(CannotRun) as caught:
        local.make(tmp_path)
    assert rows(refused(caught)) == [("out", str(tmp_path), [f"out={tmp_path}-2"])]
