"""Commands of `make tables` and `make gpu`: how many at a time, how they end, and that others go on after a failure."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.jobs import Job, run
from harness.config import registry

SLEEPS = "import time; time.sleep(0.5)"


def test_it_continues_after_a_failure_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("bad", ("-c", "print('why'); raise SystemExit(3)")), Job("good", ("-c", "print('done')"))]
    assert [(one.job.name, one.ok) for one in run(jobs, 1, tmp_path)] == [("bad", False), ("good", True)]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("bad ") and first.endswith(f"ended with 3, see {tmp_path / 'bad.log'}")
    assert second.startswith("good ") and second.endswith(" ok")
    assert (tmp_path / "bad.log").read_text() == "why\n"


@pytest.mark.usefixtures("commands")
def test_two_at_a_time_or_alone(tmp_path: Path) -> None:
    jobs = [Job(name, ("-c", SLEEPS)) for name in ("a", "b")]
    took_s = []
    for at_once in (2, 1):
        began_s = time.monotonic()
        run(jobs, at_once, tmp_path)
        took_s.append(time.monotonic() - began_s)
    assert took_s[1] >= 1.0 and took_s[0] < took_s[1]


def test_a_signal_to_it_alone_ends_its_jobs_too(tmp_path: Path) -> None:
    """Each of two jobs says that it has begun, and how it was ended; a third one does not begin."""
    job = (
        "import sys, time, pathlib\n"
        "own = pathlib.Path(sys.argv[1]); own.touch()\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: own.write_text('interrupted')"
    )
    code = (
        "import pathlib; from analysis import jobs as m\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        f"m.run([m.Job(n, ('-c', {job!r}, str(here / n))) for n in 'abc'], 2, here)"
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


def test_a_job_has_a_limit_and_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shows = Job("shows", ("-c", "import os; print(os.environ['ASKED'])"), environment={"ASKED": "for"})
    shown, late = run([shows, Job("late", ("-c", "import time; time.sleep(60)"), limit_s=0.2)], 1, tmp_path)
    assert shown.ok and shown.log.read_text() == "for\n"
    assert late.how == "not ended within 200.0 ms" and late.seconds < 10
    assert f"not ended within 200.0 ms, see {late.log}" in capsys.readouterr().out
