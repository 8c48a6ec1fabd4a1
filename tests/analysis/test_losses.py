"""`python -m analysis.losses`: which curves it draws, how it compares them, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from omegaconf import OmegaConf
from PIL import Image

from analysis import losses
from analysis.losses import Curve
from harness.cli.compose import compose
from harness.core.problem import Problem
from harness.core.record import RunRecord

GPIPE = ["engine=gpipe", "model=unet"]


def ran(folder: Path, overrides: Sequence[str], values: Sequence[float], start: str = "1") -> Path:
    """The folder of a run as the runner and its rank leave it."""
    folder.mkdir(parents=True)
    config = OmegaConf.to_container(compose([*overrides, f"out={folder}"]), resolve=True)
    RunRecord(
        folder.name, "ok", config=config, manifest={"overrides": list(overrides), "start_time": start}
    ).save(folder / "record.json")  # fmt: skip
    lines = [json.dumps({"step": step, "phase": "measured", "loss": value}) for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two runs; the folder's names are hashes, and so in no order."""
    ran(tmp_path / "sweep" / "b", ["engine=single", "model=unet", "precision=fp64"], [4.0, 2.0, 1.0], "2025-01")
    ran(tmp_path / "sweep" / "a", ["engine=single", "model=unet", "precision=fp32"], [4.0, 2.5, 1.0], "2025-02")
    return tmp_path / "sweep"


def test_a_sweep_means_its_points_in_the_order_in_which_they_began(sweep: Path, tmp_path: Path) -> None:
    alone = ran(tmp_path / "alone", [*GPIPE, "precision=fp64", "engine.checkpoint=never"], [3.0])
    found, skipped, agreed = losses.curves([alone, sweep])
    assert not skipped and found == [
        Curve("engine=gpipe precision=fp64", (3.0,)),
        Curve("engine=single precision=fp64", (4.0, 2.0, 1.0)),
        Curve("engine=single precision=fp32", (4.0, 2.5, 1.0)),
    ]
    assert agreed == "model=unet batch.size=16 batch.micro_batches=8"
    assert losses.curves([alone])[2] == "batch.size=16 batch.micro_batches=8 precision=fp64", "its title has the rest"


def test_runs_that_differ_in_nothing_have_their_folders_as_labels(tmp_path: Path) -> None:
    folders = [ran(tmp_path / name, GPIPE, [3.0]) for name in ("a", "b")]
    found, _, agreed = losses.curves(folders)
    assert [curve.title for curve in found] == ["a", "b"]
    assert agreed.startswith("engine=gpipe model=unet ")


def test_differences_are_relative_and_of_the_steps_that_both_have() -> None:
    first = Curve("first", (4.0, 2.0, 0.0, -1.0))
    assert Curve("other", (4.0, 2.5, 0.0, 1.0, 9.0)).differences(first) == [0, 0.2, 0, 2]
    assert first.differences(Curve("short", (5.0,))) == [0.2]
    assert Curve("zero", (0.0,)).differences(first) == [1.0]


def test_command_prints_the_largest_difference_from_the_first(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ran(tmp_path / "same", GPIPE, [4.0, 2.0, 1.0])
    out = tmp_path / "new" / "losses.png"
    assert losses.main([str(sweep), str(same), "--out", str(out), "--titles", "x, y,another"]) == 0
    assert Image.open(out).size == (1200, 700)
    assert capsys.readouterr().out.splitlines() == [
        "all runs: model=unet batch.size=16 batch.micro_batches=8",
        "run      steps  first loss   last loss  largest relative difference from the first run",
        "x            3    4.000000    1.000000",
        "y            3    4.000000    1.000000  2.00e-01 at step 1",
        "another      3    4.000000    1.000000  none",
        f"{out}: 3 runs",
    ]


def test_what_the_picture_shows() -> None:
    """The first run is wide, what is equal to it is on it. Where there is no difference, there is a gap."""
    curves = [Curve("$first", (4.0, 2.0, 1.0)), Curve("second", (4.0, 2.5, 1.0)), Curve("third", (4.0, 2.0))]
    drawn = losses.figure(curves, [("entropy", 3.26), ("other", 0.5)], "model=$unet")
    above, below = drawn.axes
    lines = above.get_lines()
    assert [list(line.get_ydata()) for line in lines] == [[4, 2, 1], [4, 2.5, 1], [4, 2], [3.26] * 2, [0.5] * 2]
    assert lines[0].get_linewidth() > 2 * lines[1].get_linewidth()
    assert len({to_hex(line.get_color()) for line in lines[:3]}) == 3
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
        "$first (the first run)", "second", "third (no difference)"
    ]  # fmt: skip
    assert (drawn.get_suptitle(), above.get_legend(), below.get_legend()) == ("model=$unet", None, None)
    assert [text.get_text() for text in above.texts] == ["entropy 3.26", "other 0.5"]
    differences = [line for line in below.get_lines() if line.get_linestyle() != "None"]
    assert [str(line.get_ydata().tolist()) for line in differences] == ["[nan, 0.2, nan]", "[nan, nan]"]
    assert [line.get_color() for line in differences] == [line.get_color() for line in lines[1:3]]
    assert below.get_lines()[1].get_markevery() == [1], "a lonely point has a mark"
    assert (below.get_yscale(), below.get_xlabel(), above.get_ylabel()) == ("log", "step", "loss")


@pytest.mark.usefixtures("computation")
def test_the_legend_of_many_runs_hides_no_curve() -> None:
    """It is below the panels, which stay as high: the picture grows."""
    curves = [
        Curve(f"engine=number_{n} checkpoint=except_last micro_batches=8", (4.0, 2.0 + n / 10)) for n in range(13)
    ]
    few, many = losses.figure(curves[:2]), losses.figure(curves)
    for drawn in (few, many):
        drawn.canvas.draw()
        assert drawn.legends[0].get_window_extent().y1 <= min(axes.bbox.y0 for axes in drawn.axes)
    assert many.axes[0].bbox.height == pytest.approx(few.axes[0].bbox.height, rel=0.1)
    handles = many.legends[0].legend_handles
    assert len({(line.get_color(), line.get_linestyle()) for line in handles}) == 13


def test_one_run_has_nothing_to_be_compared_with(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = sweep / "losses.png"
    assert losses.main([str(sweep / "b"), "--out", str(out), "--level", "unigram entropy=3.26"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    drawn = losses.figure(losses.curves([sweep / "b"])[0], title="batch.size=16")
    assert len(drawn.axes) == 1 and not drawn.legends
    assert drawn.get_suptitle() == "engine=single model=unet batch.size=16"


def test_runs_without_any_difference_can_be_drawn(tmp_path: Path) -> None:
    curve = Curve("same", (1.0, 2.0))
    losses.draw([curve, curve], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()
    assert [text.get_text() for text in losses.figure([curve, curve]).axes[1].texts] == [
        "no run differs from the first one"
    ]


def test_everything_that_is_missing_is_reported_at_once(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated, broken, empty = (ran(tmp_path / name, GPIPE, []) for name in ("simulated", "broken", "empty"))
    (simulated / "metrics.jsonl").unlink()
    (broken / "metrics.jsonl").write_text('{"loss": 1}\n{"los')
    folders = [sweep, simulated, broken, empty, tmp_path / "missing"]
    assert losses.main([*map(str, folders), "--out", str(tmp_path / "x.png")]) == 2
    found = [line.split("   ") for line in capsys.readouterr().err.splitlines()]
    assert [(line[0], line[1].split(":")[0], line[-1]) for line in found[:3]] == [
        (str(simulated / "metrics.jsonl"), "does not exist", "-> a run with mode=run"),
        (str(broken / "metrics.jsonl"), "cannot be read", "-> run it again"),
        (str(empty / "metrics.jsonl"), "has 0 steps", "-> run it again"),
    ]
    assert found[3][0] == str(tmp_path / "missing") and len(found) == 4
    assert not (tmp_path / "x.png").exists()


def test_a_damaged_record_of_a_sweep_is_skipped_and_named(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(sweep / "c", GPIPE, [])
    (sweep / "c" / "record.json").write_text('{"schema": 1, "sta')
    assert losses.main([str(sweep), "--out", str(tmp_path / "x.png")]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"skipped {sweep / 'c'}   ")
    assert printed.out.splitlines()[-1] == f"{tmp_path / 'x.png'}: 2 runs"


def test_a_run_without_losses_is_skipped_with_a_line_that_says_why(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error only where no run is left."""
    ran(sweep / "c", GPIPE, [])
    (sweep / "c" / "metrics.jsonl").unlink()
    record = RunRecord.load(sweep / "c" / "record.json")
    replace(record, status="infeasible", reason="no plan fits\nmore").save(sweep / "c" / "record.json")
    ran(sweep / "d", GPIPE, [])
    (sweep / "d" / "metrics.jsonl").unlink()
    assert losses.main([str(sweep), "--out", str(tmp_path / "x.png")]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        f"skipped {sweep / 'c'}   ended as infeasible: no plan fits",
        f"skipped {sweep / 'd' / 'metrics.jsonl'}   does not exist   -> a run with mode=run",
    ]
    assert printed.out.splitlines()[-1] == f"{tmp_path / 'x.png'}: 2 runs"
    assert losses.main([str(sweep / "c"), "--out", str(tmp_path / "y.png")]) == 2
    assert capsys.readouterr().err == f"{sweep / 'c'}   ended as infeasible: no plan fits\n"
    assert not (tmp_path / "y.png").exists()


def test_titles_are_as_many_as_the_runs(sweep: Path) -> None:
    with pytest.raises(ValueError, match='--titles   gives 1 for 2 runs   -> --titles "b,a"'):
        losses.curves([sweep], ["x"])


@pytest.mark.parametrize(("level", "why"), [("3.26", "'3.26' has no name"), ("entropy=low", "'low' of entropy")])
def test_a_level_has_a_name_and_a_value(level: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        losses.main(["runs", "--out", "x.png", "--level", level])
    assert why in capsys.readouterr().err


def without_losses(folder: Path, **changes: Any) -> None:
    """A point that did not train."""
    ran(folder, GPIPE, [])
    (folder / "metrics.jsonl").unlink()
    replace(RunRecord.load(folder / "record.json"), **changes).save(folder / "record.json")


def test_points_that_did_not_train_are_one_line(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for infeasible ones of an earlier sweep in the folder; a file that is damaged has a line of its own."""
    without_losses(sweep / "old1", status="infeasible", reason="this run cannot run:\n  ...")
    without_losses(sweep / "old2", status="oom")
    without_losses(sweep / "new", status="infeasible")
    without_losses(sweep / "plan", source="simulated")
    ran(sweep / "damaged", GPIPE, [])
    (sweep / "points.csv").write_text("id,engine,status\na,single,ok\nb,single,ok\nnew,gpipe,ok\nplan,gpipe,ok\n")
    assert losses.main([str(sweep), "--out", str(tmp_path / "x.png")]) == 0
    damaged, summary = capsys.readouterr().err.splitlines()
    assert damaged.startswith(f"skipped {sweep / 'damaged' / 'metrics.jsonl'}   has 0 steps")
    what, _, fix = summary.partition("   -> ")
    start, _, counts = what.partition(": ")
    assert start == f"skipped 3 points of {sweep} without losses" and fix == f"python -m slurm.status {sweep}"
    assert sorted(counts.split(", ")) == ["1 infeasible", "1 oom of an earlier sweep", "1 simulated"]


def test_infeasible_points_of_an_earlier_sweep_are_forgotten(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_losses(sweep / "old", status="infeasible", reason="this run cannot run:\n  ...")
    (sweep / "points.csv").write_text("id,engine,status\na,single,ok\nb,single,ok\n")
    assert losses.main([str(sweep), "--out", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().err == ""


def test_one_point_that_cannot_run_says_why(sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first problem, not the title above it."""
    problem = Problem("engine.threads", 1, "is not a key of engine=gpipe")
    without_losses(sweep / "c", status="infeasible", reason="this run cannot run:\n  ...", problems=(problem,))
    assert losses.main([str(sweep), "--out", str(tmp_path / "x.png")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"skipped {sweep / 'c'}   ended as infeasible: engine.threads 1   is not a key of engine=gpipe"


def test_runs_that_differ_only_in_their_seed_are_one_line(tmp_path: Path) -> None:
    for seed, engine, values in (
        (0, "single", (1, 3)),
        (1, "single", (3, 5)),
        (0, "gpipe", (1, 1)),
        (1, "gpipe", (2, 2)),
    ):
        ran(tmp_path / "s" / f"{engine}{seed}", [f"engine={engine}", f"seed={seed}"], values, start=f"{engine}{seed}")
    found, _, _ = losses.curves([tmp_path / "s"], over_seeds=True)
    assert {curve.title.split()[0]: (curve.losses, curve.band) for curve in found} == {
        "engine=single": ((2, 4), ((1, 3), (3, 5))), "engine=gpipe": ((1.5, 1.5), ((1, 2), (1, 2)))
    }  # fmt: skip
    assert len(losses.figure(found).axes[0].collections) == 2, "a band for each"
