"""The fork server: what its workers inherit, how they end, and that nobody uses one of other surroundings.

The server here loads nothing in the place of torch, and its workers run the code that is their first word.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.launch import fork_server
from harness.launch.fork_server import ForkedWorker
from harness.launch.signals import ENDING
from harness.launch.supervisor import ROOT
from tests.support.processes import children, there

SERVER = """
import sys
sys.modules["torch"] = sys.modules["torch._dynamo"] = type(sys)("torch")
from harness.launch import fork_server
words = fork_server.serve(int(sys.argv[2]))
exec(words[0])
"""
SOON_S = 10.0
FAST = [sys.executable, "-c", SERVER]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have one."""
    monkeypatch.setattr(fork_server, "_scopes", [])
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)


@pytest.fixture
def server() -> Iterator[int]:
    """The id of a server, which is over at the end."""
    before = children()
    with fork_server.scope():
        fork_server.start(FAST, environment())
        (pid,) = children() - before
        yield pid
    assert children() == before and fork_server.VARIABLE not in os.environ


def forked(folder: Path, code: str, **inherits: int) -> ForkedWorker | None:
    with (folder / "log").open("ab") as log:
        return fork_server.fork([code], log, environment() | {"NEWS": "new"}, inherits)


def worker(folder: Path, code: str, **inherits: int) -> ForkedWorker:
    found = forked(folder, code, **inherits)
    assert found
    return found


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def sleeping(folder: Path) -> ForkedWorker:
    """A worker that has started a process and sleeps; the ids of both are in the log."""
    start = "import os, time, subprocess; inner = subprocess.Popen(['sleep', '60'])"
    return worker(folder, f"{start}; print(os.getpid(), inner.pid, flush=True); time.sleep(60)")


def pids(folder: Path) -> list[int]:
    wait_for(lambda: (folder / "log").read_text().endswith("\n"))
    return [int(word) for word in (folder / "log").read_text().split()]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('bad')", 1),
        ("import os; os._exit(28)", 28),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11),
    ],
)
def test_the_exit_code_comes_back(server: int, tmp_path: Path, code: str, ended: int) -> None:
    one = worker(tmp_path, code)
    assert one.wait() == ended and one.poll() == ended
    assert ("ValueError: bad" in (tmp_path / "log").read_text()) == ("bad" in code)


def test_one_that_runs_has_none_and_others_are_forked_meanwhile(server: int, tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        read, write = os.pipe()
        waits = fork_server.fork(["import os; os.read(int(os.environ['PIPE']), 1)"], log, environment(), {"PIPE": read})
        assert waits and worker(tmp_path, "pass").wait() == 0
        assert waits.poll() is None
        os.write(write, b"x")
        assert waits.wait() == 0
        os.close(read), os.close(write)


def test_it_has_the_clients_log_and_variables_and_a_session_of_its_own(server: int, tmp_path: Path) -> None:
    code = "import os; print(os.environ['NEWS'], os.getsid(0) == os.getpid(), os.getppid(), os.read(0, 9), os.getcwd())"
    one = worker(tmp_path, f"{code}; sys.stdout.flush(); print('error', file=sys.stderr)")
    assert one.wait() == 0
    assert (tmp_path / "log").read_text().split() == ["new", "True", str(server), "b''", os.getcwd(), "error"]


def test_it_is_in_the_clients_folder(server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert worker(tmp_path, "import os; print(os.getcwd())").wait() == 0
    assert (tmp_path / "log").read_text() == f"{tmp_path}\n"


def test_it_has_signals_blocked_as_one_that_is_started_alone(server: int, tmp_path: Path) -> None:
    code = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])), signal.getsignal(17).name)"
    assert worker(tmp_path, code).wait() == 0
    *blocked, child = (tmp_path / "log").read_text().split()
    assert set(map(int, blocked)) >= set(map(int, ENDING)) and child == "SIG_DFL"


def test_it_has_the_descriptors_that_it_inherits_and_none_of_the_server(server: int, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("content")
    other = sleeping(tmp_path)
    with other.connection, (tmp_path / "given").open() as given:
        pids(tmp_path)
        show = "import os; from pathlib import Path; print(os.read(int(os.environ['GIVEN']), 9)); "
        show += "print(*map(os.path.realpath, Path('/proc/self/fd').iterdir()))"
        assert worker(tmp_path, show, GIVEN=given.fileno()).wait() == 0
    found = (tmp_path / "log").read_text()
    assert "b'content'" in found and "given" in found
    assert "socket:" not in found and "pipe:" not in found


def test_what_it_started_ends_with_it(server: int, tmp_path: Path) -> None:
    one = sleeping(tmp_path)
    own, inner = pids(tmp_path)
    assert one.pid == own
    os.kill(own, signal.SIGTERM)
    os.kill(own, signal.SIGKILL)
    assert one.wait() == -9
    wait_for(lambda: not there(inner))


def test_it_ends_with_its_client(server: int, tmp_path: Path) -> None:
    one = sleeping(tmp_path)
    started = pids(tmp_path)
    one.connection.close()
    wait_for(lambda: not any(map(there, started)))
    assert worker(tmp_path, "pass").wait() == 0, "the server goes on"


def test_it_ends_with_its_server(server: int, tmp_path: Path) -> None:
    one = sleeping(tmp_path)
    own, _ = pids(tmp_path)
    os.kill(server, signal.SIGKILL)
    assert one.wait() == -9
    wait_for(lambda: not there(own))
    assert forked(tmp_path, "pass") is None


def test_a_signal_to_all_does_not_end_the_server(server: int, tmp_path: Path) -> None:
    for number in ENDING:
        os.kill(server, number)
    assert worker(tmp_path, "pass").wait() == 0


def test_it_ends_with_its_scope_and_so_do_workers(tmp_path: Path) -> None:
    with fork_server.scope():
        fork_server.start(FAST, environment())
        with fork_server.scope():
            one = sleeping(tmp_path)
            started = pids(tmp_path)
        assert one.poll() is None, "an inner scope ends nothing"
    assert one.wait() == -9
    wait_for(lambda: not there(started[0]))
    assert forked(tmp_path, "pass") is None


def test_there_is_one_for_all(server: int, tmp_path: Path) -> None:
    before = children()
    fork_server.start(FAST, environment())
    assert children() == before


def test_outside_of_a_scope_there_is_none(tmp_path: Path) -> None:
    fork_server.start(FAST, environment())
    assert forked(tmp_path, "pass") is None


def test_of_other_surroundings_there_is_none(server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read variables, and the kernel has limits, that a worker gets from the server."""
    with monkeypatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        assert forked(tmp_path, "pass") is None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, limit[1]))
        assert forked(tmp_path, "pass") is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    monkeypatch.setenv("COLUMNS", "99")
    monkeypatch.setenv("REGATTA_CACHE", "elsewhere")
    assert worker(tmp_path, "pass").wait() == 0, "these are read later, and are the client's"


def test_where_modules_are_found_by_the_folder_there_is_none_in_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    with fork_server.scope():
        fork_server.start(FAST, environment())
        assert worker(tmp_path, "pass").wait() == 0
        monkeypatch.chdir(tmp_path)
        assert forked(tmp_path, "pass") is None


def test_other_surroundings_get_a_server_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = "outer 0123456789abcdef"
    monkeypatch.setenv(fork_server.VARIABLE, outer)
    with fork_server.scope():
        fork_server.start(FAST, environment())
        assert worker(tmp_path, "pass").wait() == 0
    assert os.environ[fork_server.VARIABLE] == outer


def test_a_server_that_cannot_load_torch_gives_no_answer(tmp_path: Path) -> None:
    with fork_server.scope():
        fork_server.start([sys.executable, "-c", "raise ImportError"], environment())
        assert forked(tmp_path, "pass") is None


def does(words: list[str]) -> int:
    """What workers of a server do that is this process, forked."""
    exec(words[0], {"known": KNOWN})
    return int(words[1])


KNOWN: list[str] = []


@pytest.fixture
def this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of such a server, which is over at the end."""
    before = children()
    monkeypatch.setattr(sys.modules[__name__], "KNOWN", ["what this process has made"])
    with fork_server.forked(does) as name:
        yield name
    assert children() == before


def asked(name: str, folder: Path, code: str, number: int = 0) -> ForkedWorker:
    with (folder / "log").open("ab") as log:
        found = fork_server.ask(name, [code, str(number)], log, environment() | {"NEWS": "new"}, {})
    assert found
    return found


@pytest.mark.parametrize(
    ("code", "ended", "says"),
    [
        ("print(*known)", 3, "what this process has made"),
        ("import sys; print('error', file=sys.stderr); sys.exit('no')", 1, "error"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os; print(os.environ['NEWS'], os.getsid(0) == os.getpid(), repr(os.read(0, 9)))", 3, "new True b''"),
    ],
)
def test_a_process_that_is_forked_itself(this_process: str, tmp_path: Path, code: str, ended: int, says: str) -> None:
    assert asked(this_process, tmp_path, code, 3).wait() == ended
    assert says in (tmp_path / "log").read_text()
    assert fork_server.VARIABLE not in os.environ, "it is for its caller alone"


@pytest.mark.parametrize("number", ENDING)
def test_its_workers_take_signals(this_process: str, tmp_path: Path, number: signal.Signals) -> None:
    one = asked(this_process, tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    wait_for(lambda: (tmp_path / "log").read_text())
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    one.send_signal(number)
    assert one.wait(SOON_S) == (1 if number == signal.SIGINT else -number)
    one.send_signal(number)  # to nobody


def test_its_workers_end_with_it(tmp_path: Path) -> None:
    with fork_server.forked(does) as name:
        one = asked(name, tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
        started = pids(tmp_path)
    assert one.wait() == -9
    wait_for(lambda: not there(started[0]))
    with (tmp_path / "log").open("ab") as log:
        assert fork_server.ask(name, ["pass", "0"], log, environment(), {}) is None
