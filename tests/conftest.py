"""For all tests: gpu marks, no silent skips in continuous integration, and no file outside the checkout."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

from tests import tiers
from tests.support import processes

CI = os.environ.get("CI", "").lower() in ("1", "true")
ROOT = Path(__file__).resolve().parent.parent

hypothesis.settings.register_profile("full", deadline=None, derandomize=CI)
hypothesis.settings.register_profile(tiers.FAST, deadline=None, derandomize=CI, max_examples=10)
hypothesis.settings.load_profile("full")  # unless --hypothesis-profile=fast
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as make has it: ranks are forked, and a fork has no other threads
os.environ.setdefault("REGATTA_CACHE", str(ROOT / ".pytest_cache" / "regatta"))
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell starts in the background inherits that
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # what nohup starts inherits that
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_skipped: list[str] = []


@pytest.fixture
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meters count no workspaces inside kernels: no prediction has them, and each type of CPU has its own."""
    from harness.runtime import memory_meter

    monkeypatch.setattr(memory_meter, "_with_peak", lambda call: (call(), 0))


@pytest.fixture
def commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that starts commands, each of which takes seconds. None is left when it ends, also if it fails."""
    with _own_workers(request), _nothing_left():
        yield


@pytest.fixture
def ranks() -> Iterator[None]:
    """A test that trains in several processes. None is left when it ends, also if it fails."""
    with _nothing_left():
        yield


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """Workers of runs are forked from one process that has loaded torch, as those of a sweep are: in two seconds less.

    Tests of how a worker is started alone, and ends, do without.
    """
    from harness.launch import fork_server, supervisor

    with fork_server.scope():
        supervisor.start_fork_server()
        yield


@pytest.fixture
def computation() -> None:
    """A test that computes for seconds: a large search, all pictures or all sweeps of the papers."""


@pytest.fixture
def at_length() -> None:
    """A test that repeats at length, or on eight ranks, what a shorter one has: it is left to `make soak`."""


@pytest.fixture
def browser() -> Iterator[None]:
    """A test that looks at a page with Chromium. None is left when it ends, also if it fails."""
    with _nothing_left():
        yield


@contextmanager
def _own_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hides the session's fork server from a test that does without: another one may have started it before."""
    from harness.launch import fork_server

    with pytest.MonkeyPatch.context() as patch:
        if "fork_server" not in request.fixturenames:
            patch.setattr(fork_server, "_scopes", [])
            patch.delenv(fork_server.VARIABLE, raising=False)
        yield


@contextmanager
def _nothing_left() -> Iterator[None]:
    before = processes.children()
    try:
        yield
    finally:
        left = processes.left(processes.children() - before)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"{len(left)} processes are left"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the full tier, and skip tests marked gpu where torch sees no CUDA device.

    Torch is imported only if there are such tests.
    """
    tiers.mark(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


def pytest_collection_finish() -> None:
    """Garbage collections leave out what is there before the first test: millions of objects."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "gpu" not in report.keywords and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if CI and _skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CI and _skipped:
        terminalreporter.section("skipped: an error where CI=true", red=True)
        for name in _skipped:
            terminalreporter.line(name)
