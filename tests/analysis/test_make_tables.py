"""Which sweeps `make tables` runs, how many at a time, and that it continues after a failure."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis import make_tables, records
from analysis.autoddl.page import PAGE as AUTODDL
from analysis.make_tables import Job
from analysis.paper_pages import PAGES
from analysis.scheme_comparison import SWEEPS
from harness.config import registry

SLEEPS = "import time; time.sleep(0.5)"


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


def test_it_continues_after_a_failure_and_reports_it(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("bad", ("-c", "print('why'); raise SystemExit(3)")), Job("good", ("-c", "print('done')"))]
    assert make_tables.run(jobs, 1) == ["bad"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("bad ") and first.endswith(f"ended with 3, see {logs / 'bad.log'}")
    assert second.startswith("good ") and second.endswith(" ok")
    assert (logs / "bad.log").read_text() == "why\n"


@pytest.mark.usefixtures("commands")
def test_two_at_a_time_or_alone() -> None:
    jobs = [Job(name, ("-c", SLEEPS)) for name in ("a", "b")]
    took_s = []
    for at_once in (2, 1):
        began_s = time.monotonic()
        make_tables.run(jobs, at_once)
        took_s.append(time.monotonic() - began_s)
    assert took_s[1] >= 1.0 and took_s[0] < took_s[1]


def test_what_failed_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(make_tables, "simulated", lambda full: [Job("bad", ("-c", "raise SystemExit(1)"))])
    monkeypatch.setattr(make_tables, "measured", lambda: [Job("long", ("-c", ""), full=True)])
    monkeypatch.setattr(make_tables, "PAGES", (Job("page", ("-c", "")),))
    assert make_tables.main([]) == 1
    printed = capsys.readouterr().out
    assert "long" not in printed and printed.splitlines()[-1].endswith("failed: bad")


def test_a_signal_to_it_alone_ends_its_jobs_too(tmp_path: Path) -> None:
    """Each of two jobs says that it has begun, and how it was ended; a third one does not begin."""
    job = (
        "import sys, time, pathlib\n"
        "own = pathlib.Path(sys.argv[1]); own.touch()\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: own.write_text('interrupted')"
    )
    code = (
        "import pathlib; from analysis import make_tables as m\n"
        f"m.LOGS = pathlib.Path({str(tmp_path)!r})\n"
        f"m.run([m.Job(n, ('-c', {job!r}, {str(tmp_path)!r} + '/' + n)) for n in 'abc'], 2)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=registry.ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()) and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(5) != 0
        finally:
            process.kill()
    assert [(tmp_path / name).read_text() for name in "ab"] == ["interrupted"] * 2
    assert not (tmp_path / "c").exists()
