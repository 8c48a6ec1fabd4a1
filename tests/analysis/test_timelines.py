"""Which panels `python -m analysis.timelines` draws for the folders of runs and sweeps, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from PIL import Image

from analysis import timelines
from harness.cli.compose import compose
from harness.core.record import RunRecord, Source
from harness.core.trace import Span, Trace
from tests.problems import keys, refused

GPIPE = ["engine=gpipe", "model=unet"]


def steps(lengths_s: Sequence[float]) -> Trace:
    """Steps of one forward task each, one right after the other."""
    spans, ends, now = [], [], 5.0
    for step, length_s in enumerate(lengths_s):
        spans.append(Span(f"0F{step}", 0, "compute", now, now + length_s, step))
        ends.append((now, now + length_s))
        now += length_s
    return Trace(tuple(spans), tuple(ends))


def record(folder: Path, overrides: Sequence[str], source: Source, start: str) -> RunRecord:
    config = OmegaConf.to_container(compose([*overrides, f"out={folder}"]), resolve=True)
    manifest = {"overrides": [*overrides, f"out={folder}"], "start_time": start}
    return RunRecord(folder.name, "ok", source, config=config, manifest=manifest, trace="trace.json.gz")


def ran(folder: Path, overrides: Sequence[str], source: Source = "simulated", start: str = "1", lengths=(1.0,)) -> Path:
    """The folder of a run as the runner leaves it."""
    record(folder, overrides, source, start).save(folder / "record.json")
    steps(lengths).save(folder / "trace.json.gz")
    return folder


def without_trace(folder: Path, reason: str) -> Path:
    RunRecord(folder.name, "infeasible", reason=reason).save(folder / "record.json")
    return folder


@pytest.fixture
def ablation(tmp_path: Path) -> Path:
    """A sweep of the rows of torchgpipe's Table 1; folders are hashes, and so in no order."""
    rows = {"c": (False, False, False), "a": (True, False, False), "d": (True, True, False), "b": (True, True, True)}
    for number, (name, values) in enumerate(rows.items()):
        keys = [f"engine.{key}={str(value).lower()}" for key, value in zip(ROWS, values, strict=True)]
        ran(tmp_path / "table1" / name, [*GPIPE, "mode=simulate", *keys], start=f"2025-0{number}", lengths=[4 - number])
    return tmp_path / "table1"


ROWS = ("dependency", "streams", "portals")


def test_a_sweep_means_its_points_in_the_order_in_which_they_began(ablation: Path) -> None:
    panels = timelines.panels([ablation])
    assert [title for title, _ in panels] == [
        "engine=gpipe model=unet dependency=false streams=false portals=false, simulated",
        "engine=gpipe model=unet dependency=true streams=false portals=false, simulated",
        "engine=gpipe model=unet dependency=true streams=true portals=false, simulated",
        "engine=gpipe model=unet dependency=true streams=true portals=true, simulated",
    ]
    assert [trace.window_s for _, trace in panels] == pytest.approx([4, 3, 2, 1])


def test_a_measured_run_has_its_simulation_below_it(tmp_path: Path) -> None:
    folder = ran(tmp_path / "run", GPIPE, "measured", lengths=[3.0, 2.0, 1.0])
    steps([0.5]).save(folder / "simulated.json.gz")
    for step, measured_s in ((None, 1.0), (0, 3.0), (1, 2.0)):
        panels = timelines.panels([folder], step)
        assert [title for title, _ in panels] == [f"engine=gpipe model=unet, {s}" for s in ("measured", "simulated")]
        assert [trace.window_s for _, trace in panels] == pytest.approx([measured_s, 0.5])


def test_titles_of_one_s_own(ablation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for each run: a measured one has it twice. As many as the runs that have a trace."""
    measured = ran(tmp_path / "run", GPIPE, "measured", lengths=[1.0])
    steps([0.5]).save(measured / "simulated.json.gz")
    without_trace(ablation / "e", "no devices")
    panels = timelines.panels([measured, ablation], titles=["mine", "w", "x", "y", "z"])
    assert [title for title, _ in panels] == ["mine, measured", *(f"{t}, simulated" for t in ("mine", *"wxyz"))]
    picture = tmp_path / "x.png"
    command = [str(ablation), "--out", str(picture), "--titles"]
    assert timelines.main([*command, "w, x,y"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == '--titles   gives 3 for 4 runs   -> --titles "c,a,d,b"'
    assert not picture.exists()
    assert timelines.main([*command, "c,a,d,b"]) == 0


def test_a_simulated_run_has_one_step_only_and_shows_it_next_to_any_other(tmp_path: Path) -> None:
    folders = [ran(tmp_path / "a", GPIPE, "measured", lengths=[3.0, 2.0, 1.0]), ran(tmp_path / "b", GPIPE)]
    assert [trace.window_s for _, trace in timelines.panels(folders, 1)] == pytest.approx([2.0, 1.0])


def test_titles_say_what_differs_and_nothing_else(tmp_path: Path) -> None:
    """Keys that only one run has, and those that a step does not depend on, are no difference."""
    one = ran(tmp_path / "one", ["engine=single", "model=unet", "batch.micro_batches=2", "steps=3", "tracker=none"])
    two = ran(tmp_path / "two", [*GPIPE, "batch.micro_batches=4", "engine.portals=false", "planner=uniform"])
    three = ran(tmp_path / "three", [*GPIPE, "batch.micro_batches=4", "planner=uniform"], "measured")
    assert [title for title, _ in timelines.panels([one, two, three])] == [
        "engine=single model=unet checkpoint=never planner=balance micro_batches=2, simulated",
        "engine=gpipe model=unet checkpoint=except_last planner=uniform micro_batches=4 portals=false, simulated",
        "engine=gpipe model=unet checkpoint=except_last planner=uniform micro_batches=4 portals=true, measured",
    ]


def test_a_size_says_of_what_it_is(tmp_path: Path) -> None:
    folders = [ran(tmp_path / size, ["engine=gpipe", f"batch.size={size}"]) for size in ("16", "32")]
    titles = [title for title, _ in timelines.panels(folders)]
    assert titles == [f"engine=gpipe model=unet batch.size={size}, simulated" for size in ("16", "32")]


def test_the_model_is_what_the_user_chose(tmp_path: Path) -> None:
    """unet_5_64 and unet_6_72 are the same network with other keys, which their names say."""
    small = ran(tmp_path / "a", ["engine=gpipe", "model=unet_5_64"])
    large = ran(tmp_path / "b", ["engine=gpipe", "model=unet_6_72"])
    titles = [title for title, _ in timelines.panels([small, large])]
    assert titles == ["engine=gpipe model=unet_5_64, simulated", "engine=gpipe model=unet_6_72, simulated"]


def test_runs_that_differ_in_nothing_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    folders = [ran(tmp_path / name, GPIPE) for name in ("first", "second")]
    titles = [title for title, _ in timelines.panels(folders)]
    assert titles == [f"engine=gpipe model=unet ({name}), simulated" for name in ("first", "second")]


def test_command_writes_the_picture(ablation: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "figure7.png"
    assert timelines.main([str(ablation), "--out", str(out)]) == 0
    width, height = Image.open(out).size
    assert (width, height > 4 * 60) == (1200, True)
    assert capsys.readouterr().out.strip() == f"{out}: 4 timelines"


def test_points_without_a_trace_are_left_out_and_named(ablation: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_trace(ablation / "e", "stage 3 needs 27.1 GiB of 22.0\nand more")
    assert len(timelines.panels([ablation])) == 4
    printed = capsys.readouterr().err
    assert printed.startswith(
        f"left out: {ablation / 'e'}   has no trace (status infeasible stage 3 needs 27.1 GiB of 22.0"
    )


def test_everything_that_is_missing_is_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = ran(tmp_path / "good", GPIPE)
    planned = without_trace(tmp_path / "planned", "no devices")
    damaged, lost = ran(tmp_path / "damaged", GPIPE), ran(tmp_path / "lost", GPIPE)
    (damaged / "trace.json.gz").write_bytes((damaged / "trace.json.gz").read_bytes()[:60])
    (lost / "trace.json.gz").unlink()
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    for folder in (broken, empty):
        folder.mkdir()
    (broken / "record.json").write_text("{")
    folders = [good, planned, damaged, lost, broken, empty, tmp_path / "missing"]
    assert timelines.main([*map(str, folders), "--out", str(tmp_path / "x.png")]) == 2
    named = [planned, damaged / "trace.json.gz", lost / "trace.json.gz", broken, empty, tmp_path / "missing"]
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("   ")[0] for line in lines if line.startswith(str(tmp_path))] == [*map(str, named)]
    with pytest.raises(timelines.NoTrace) as caught:
        timelines.panels(folders)
    assert keys(refused(caught)) == [*map(str, named)]
    assert "cannot be read" in lines[1]
    assert not (tmp_path / "x.png").exists()


def test_a_step_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    folder = ran(tmp_path / "run", GPIPE, "measured", lengths=[1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"has steps 0 to 2, not 3   -> --step 2"):
        timelines.panels([folder], 3)
    steps([]).save(folder / "trace.json.gz")
    with pytest.raises(ValueError, match="has no spans"):
        timelines.panels([folder])


def test_a_folder_is_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        timelines.main(["runs/a", "--out", str(tmp_path)])
    assert f"--out: {tmp_path} is a folder" in capsys.readouterr().err
