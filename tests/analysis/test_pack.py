"""A sweep's records as one small file that tables can be made of."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import pack, records, run_artifacts
from analysis.record_archive import KEPT, LEFT_OUT, document
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.trace import Span, Trace

SWEEP = "myelin_fig9-local"


def run(folder: Path, number: int, status: Any = "ok", start: int = 0) -> RunRecord:
    """A run of the sweep with its files: as many losses as its number, and one more."""
    place = folder / SWEEP / str(number)
    config = {"out": str(place), "engine": {"name": "gpipe"}, "batch": {"size": 8 * number}}
    manifest = {"overrides": [f"batch.size={8 * number}", f"out={place}"], "start_time": f"2026-01-0{1 + start}",
                "command": ["run.py"], "machine": {"host": socket.gethostname(), "cpu": "EPYC"}}  # fmt: skip
    plan = {"mesh": {"data": 1, "pipeline": 2, "tensor": 1}, "pattern": [1], "predicted": {"step_time_s": 1.0}}
    record = RunRecord(f"{number}-{status}-{start}", status, "measured", config=config, plan=plan,
                       metrics={"step_time_s": 0.5 + number}, predicted={"step_time_s": 1.0, "tasks_s": {"0F0": 1.0}},
                       manifest=manifest, trace="trace.json.gz")  # fmt: skip
    record.save(place / "record.json")
    lines = [json.dumps({"step": step, "loss": 1 / (1 + step)}) for step in range(number + 1)]
    (place / "metrics.jsonl").write_text("\n".join(lines))
    ModelProfile((LayerProfile(param_bytes=400),)).save(place / "profile.json")
    spans = tuple(Span(name, 0, "compute", at, at + 1.0) for at, name in enumerate(("0F0", "0F1", "0B0", "0B1")))
    Trace(spans, ((0.0, 4.0),)).save(place / "trace.json.gz")
    return record


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    for number in (1, 2):
        run(tmp_path / "runs", number)
    path, count = pack.write(tmp_path / "runs" / SWEEP, tmp_path / "archives")
    assert (path, count) == (tmp_path / "archives" / f"{SWEEP}.jsonl.gz", 2)
    return path


def lines(archive: Path) -> list[str]:
    return gzip.decompress(archive.read_bytes()).decode().splitlines()


def test_an_archive_has_all_but_what_it_leaves_out(tmp_path: Path, packed: Path) -> None:
    before = {one.id: one for one in records.load([tmp_path / "runs" / SWEEP]).records}
    for record in records.load([packed]).records:
        original = before[record.id]
        assert (record.status, record.source, record.reason) == (original.status, original.source, original.reason)
        assert record.config == original.config | {"out": f"runs/{SWEEP}/{Path(original.config['out']).name}"}
        assert record.plan == {"mesh": {"data": 1, "pipeline": 2, "tensor": 1}, "pattern": [1]}
        assert record.metrics["profile"]["layers"][0]["param_bytes"] == 400
        assert record.predicted == {"step_time_s": 1.0} and record.trace is None
        assert record.metrics.items() >= original.metrics.items()
        assert record.manifest["machine"] == {"host": "host", "cpu": "EPYC"}
    (line, _) = lines(packed)
    assert not [path for path in LEFT_OUT if path not in KEPT and _has(json.loads(line), path.split("."))]


def _has(document: Any, path: Sequence[str]) -> bool:
    return not path or (isinstance(document, dict) and path[0] in document and _has(document[path[0]], path[1:]))


def test_what_tables_need_of_files_is_the_same_from_the_archive(tmp_path: Path, packed: Path) -> None:
    for found in (records.load([tmp_path / "runs" / SWEEP]), records.load([packed])):
        assert [run_artifacts.losses(one) for one in found.records] == [[1.0, 0.5], [1.0, 0.5, 1 / 3]]
        assert [run_artifacts.parameters(one) for one in found.records] == [100, 100]
        assert [run_artifacts.in_flight(one) for one in found.records] == [2, 2]


def test_nothing_of_this_machine_is_in_it(tmp_path: Path, packed: Path) -> None:
    text = "\n".join(lines(packed))
    assert str(tmp_path) not in text and f'"{socket.gethostname()}"' not in text and str(Path.home()) not in text
    assert len(lines(packed)) == 2, "a record is a line"


def test_a_point_that_is_only_in_the_archive_is_kept_and_a_newer_failed_one_does_not_count(
    tmp_path: Path, packed: Path
) -> None:
    again = tmp_path / "again" / SWEEP
    run(tmp_path / "again", 2, "error", start=1)
    run(tmp_path / "again", 3)
    _, count = pack.write(again, tmp_path / "archives")
    assert count == 3
    assert {one.id for one in records.load([packed]).records} == {"1-ok-0", "2-ok-0", "3-ok-0"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command works in a folder of its own, and writes its archives there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pack.write, "__defaults__", (tmp_path / "archives",))


@pytest.mark.usefixtures("here")
def test_the_command_archives_all_scales_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Path("runs"), 1)
    assert pack.main(["myelin_fig9"]) == 0 == pack.main([SWEEP]) == pack.main([])
    assert capsys.readouterr().out.count("1 records,") == 3
    assert (tmp_path / "archives" / f"{SWEEP}.jsonl.gz").is_file()
    assert pack.main(["myelin_fig9", "madpipe_fig6", "nothing"]) == 2
    message = capsys.readouterr().err
    assert "madpipe_fig6" in message and "+sweeps=madpipe_fig6" in message and "nothing" in message


def test_a_folder_without_a_record_that_can_be_read_is_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine" / "0").mkdir(parents=True)
    (tmp_path / "mine" / "0" / "record.json").write_text("{}")
    with pytest.raises(CannotRun, match="mine"):
        pack.write(tmp_path / "mine", tmp_path / "archives")
    RunRecord("x", "ok").save(tmp_path / "mine" / "0" / "record.json")
    monkeypatch.chdir(tmp_path / "mine")
    assert pack.write(Path("."), tmp_path / "archives")[0].name == "mine.jsonl.gz"


@pytest.mark.usefixtures("here")
def test_a_sweep_of_one_s_own_is_packed_by_its_path_or_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(Path("made"), 1)
    for place in (Path("runs") / "mine", Path("elsewhere") / "yours"):
        shutil.copytree(Path("made") / SWEEP, place)
    (tmp_path / "runs" / "empty").mkdir()
    assert pack.main([]) == 0 and not capsys.readouterr().out, "by default only sweeps of sweeps/"
    assert pack.main(["runs/mine/", "mine", str(tmp_path / "elsewhere" / "yours")]) == 0
    assert [line.split("   ")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"written to {tmp_path / 'archives' / name}.jsonl.gz" for name in ("mine", "yours")
    ]
    assert len(records.load([tmp_path / "archives" / "yours.jsonl.gz"]).records) == 1
    assert pack.main(["runs/mine", "runs/empty", "runs/gone"]) == 2
    message = capsys.readouterr().err
    assert "runs/empty" in message and "runs/gone" in message and "runs/mine" not in message
    with pytest.raises(SystemExit):
        pack.main(["--help"])
    assert "analysis/results/records" in capsys.readouterr().out


def test_of_plans_only_what_tables_need_is_kept(tmp_path: Path) -> None:
    one = run(tmp_path / "runs", 1)
    plan = {"mesh": {"data": 1}, "stages": [{"device": 0, "first": 0, "last": 3}, {"device": 0, "first": 4, "last": 5}]}
    predicted = {"period_s": 1.0, "utilization": [0.5]}
    planned = replace(one, config=one.config | {"mode": "plan"}, plan=plan, predicted=predicted)
    planned.manifest[run_artifacts.ORIGIN] = one.config["out"]
    found = document(planned)
    assert found["plan"]["stages"] == [{"device": 0}, {"device": 0}] and found["predicted"] == {"period_s": 1.0}
    assert one.plan is not None and one.plan["pattern"] == [1], "the record itself stays as it is"
