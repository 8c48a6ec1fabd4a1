"""Which sweeps `make tables` runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import make_tables, records
from analysis.autoddl.page import PAGE as AUTODDL
from analysis.jobs import Job
from analysis.paper_pages import PAGES
from analysis.scheme_comparison import SWEEPS


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(make_tables, "LOGS", tmp_path)
    return tmp_path


def test_all_sweeps_of_all_papers_are_run_once_in_full() -> None:
    names = [job.name for job in (*make_tables.simulated(True), *make_tables.measured())]
    papers = [name for page in PAGES.values() for name in page.sweeps]
    assert sorted(names) == sorted([*papers, *SWEEPS.values(), "traces-local", "traces-paper"])


def test_every_table_of_every_paper_is_made_when_there_is_less_time() -> None:
    jobs = make_tables.chosen(make_tables.simulated(False), False)
    assert {name.partition("-")[0] for page in PAGES.values() for name in page.sweeps} - {
        job.name.partition("-")[0] for job in jobs
    } == {"autoddl_fig4", "autoddl_table2", "madpipe_activations", "myelin_ablation"}
    assert "autoddl_fig4" in AUTODDL.sweeps


def test_less_of_madpipe_are_points_of_the_whole_grid() -> None:
    from harness.sweep.points import expand

    for name in ("madpipe_fig6", "madpipe_fig8", "madpipe_published"):
        (few,) = (job for job in make_tables.simulated(False) if job.name == name)
        points = {point.id for point in expand(few.arguments[2:])}
        assert points and points < {point.id for point in expand([f"+sweeps={name}"])}


def test_commands_are_those_that_make_the_folders_of_these_names() -> None:
    for job in (*make_tables.simulated(True), *make_tables.measured()):
        assert f"python {' '.join(job.arguments)}" == records.sweep_command(job.name)


def test_what_failed_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(make_tables, "simulated", lambda full: [Job("bad", ("-c", "raise SystemExit(1)"))])
    monkeypatch.setattr(make_tables, "measured", lambda: [Job("long", ("-c", ""), full=True)])
    monkeypatch.setattr(make_tables, "PAGES", (Job("page", ("-c", "")),))
    assert make_tables.main([]) == 1
    printed = capsys.readouterr().out
    assert "long" not in printed and printed.splitlines()[-1].endswith("failed: bad")
