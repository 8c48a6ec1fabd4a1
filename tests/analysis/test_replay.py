"""`make replay` on folders: what it takes for a run, and when a replay is off. Its own runs take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from analysis import replay
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.record import RunRecord, Source
from harness.core.trace import Span, Trace

TASKS = ("0F0", "0B0", "0F1", "0B1", "0step")


def ran(folder: Path, length_s: float, source: Source = "measured", trace: str | None = "trace.json.gz") -> Path:
    """A run of engine=single whose five tasks take a second each, in a step of `length_s`."""
    folder.mkdir()
    OmegaConf.save({"engine": {"name": "single", "checkpoint": "never", "threads": 1}}, folder / "config.yaml")
    Plan.contiguous([1], micro_batches=2).save(folder / "plan.json")
    ModelProfile((LayerProfile("l", forward_s=1, backward_s=1),)).save(folder / "profile.json")
    spans = tuple(Span(op, 0, "compute", 1.0 * at, 1.0 * at + 1, 0) for at, op in enumerate(TASKS))
    Trace(spans, ((0.0, length_s),)).save(folder / "trace.json.gz")
    RunRecord("x", "ok", source, trace=trace).save(folder / "record.json")
    return folder


@pytest.mark.parametrize(("length_s", "code", "verdict"), [(5.1, 0, "ok"), (5.2, 1, "off by more than 3%")])
def test_a_step_may_be_three_percent_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length_s: float, code: int, verdict: str
) -> None:
    folder = ran(tmp_path / "run", length_s)
    assert replay.step_ratios(folder) == [pytest.approx(5 / length_s)]
    assert replay.main([str(folder)]) == code
    assert capsys.readouterr().out.rstrip().endswith(verdict)


def test_what_is_no_measured_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated, failed = ran(tmp_path / "a", 5, "simulated"), ran(tmp_path / "b", 5, trace=None)
    broken, partial = ran(tmp_path / "c", 5), ran(tmp_path / "d", 5)
    (broken / "plan.json").write_text("{")
    (partial / "trace.json.gz").unlink()
    for folder, complaint in (
        (tmp_path / "missing", "holds no run: "),
        (tmp_path, "holds no run: "),
        (simulated, "is of a run that left no measured trace (simulated, ok)   -> "),
        (failed, "is of a run that left no measured trace (measured, ok)   -> "),
        (broken, "cannot be read: "),
        (partial, f"holds no run: {partial / 'trace.json.gz'}: No such file"),
    ):
        assert replay.main([str(folder)]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert printed.err.startswith(f"{folder}   {complaint}")


def test_help_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        replay.main(["--help"])
    assert "about 2 minutes" in capsys.readouterr().out
