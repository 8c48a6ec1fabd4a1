"""The lock of a run's folder: one user at a time, none after its end, and readers that do not disturb."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import CannotRun
from harness.core.run_files import LOCK
from harness.run import folder_lock, runner
from harness.run.folder_lock import Busy, held, look
from tests.problems import refused, row
from tests.support.lock_holder import holder


def test_one_process_at_a_time_and_none_after_a_kill(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(Busy, match=f"process {process.pid} on {socket.gethostname()}"), held(tmp_path):
            pass
        seen = look(tmp_path)
        assert seen.held and seen.owner and (seen.owner.process, seen.owner.here) == (process.pid, True)
        process.kill()
        process.wait()
        seen = look(tmp_path)
        assert seen.held is False and seen.owner and seen.owner.process == process.pid
        with held(tmp_path) as lock:
            assert lock.taken and look(tmp_path).held
    assert look(tmp_path).held is False


def test_a_process_is_not_refused_by_its_own_lock(tmp_path: Path) -> None:
    with held(tmp_path) as outer:
        with held(tmp_path) as inner:
            assert (inner.taken, inner.descriptor) == (False, outer.descriptor)
        with pytest.raises(Busy), held_elsewhere(tmp_path):
            pass


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[None]:
    """As a process that has inherited nothing."""
    code = "import sys\nfrom pathlib import Path\nfrom harness.run.folder_lock import Busy, held\n"
    code += "try:\n    with held(Path(sys.argv[1])):\n        pass\nexcept Busy:\n    sys.exit(7)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=registry.ROOT, check=False)
    if done.returncode == 7:
        raise Busy
    assert done.returncode == 0
    yield


def test_a_child_that_inherits_the_lock_has_it(tmp_path: Path) -> None:
    code = "import os, sys\nfrom pathlib import Path\nfrom harness.run import folder_lock\n"
    code += "with folder_lock.held(Path(sys.argv[1])) as lock:\n"
    code += "    sys.exit(5 if lock.taken or os.get_inheritable(lock.descriptor) else 0)"
    with held(tmp_path) as lock:
        given = folder_lock.handed_on(lock)
        environment = os.environ | {name: str(number) for name, number in given.items()}
        command = [sys.executable, "-c", code, str(tmp_path)]
        subprocess.run(command, cwd=registry.ROOT, check=True, env=environment, pass_fds=tuple(given.values()))


def test_the_lock_is_free_once_the_last_process_with_it_has_ended(tmp_path: Path) -> None:
    with holder(tmp_path, "with a child") as process:
        process.kill()
        process.wait()
        assert look(tmp_path).held, "the child of the one that was killed has it"
    deadline = time.monotonic() + 60
    while look(tmp_path).held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert look(tmp_path).held is False


def test_a_reader_makes_no_start_fail(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    handle = os.open(tmp_path / LOCK, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    thread = threading.Timer(0.1, os.close, [handle])
    thread.start()
    with held(tmp_path, patience_s=60):
        pass
    thread.join()


def started(folder: Path) -> CannotRun:
    typed = ["mode=plan", "engine=single", "model=mlp", "tracker=none", f"out={folder}"]
    with pytest.raises(CannotRun) as caught:
        runner.run(compose(typed), typed)
    assert refused(caught)
    return caught.value


def test_a_folder_in_use_is_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("mine")
    with holder(tmp_path) as process:
        (problem,) = started(tmp_path).problems
    assert row(problem) == ("out", str(tmp_path), [f"out={tmp_path}-2"])
    assert str(process.pid) in problem.message
    assert {path.name for path in tmp_path.iterdir()} == {LOCK, "record.json"}
    assert (tmp_path / "record.json").read_text() == "mine"


def a_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.symlink_to(path.parent / "elsewhere")


def no_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder_lock.fcntl, "flock", flock)


@pytest.mark.parametrize("spoil", [a_folder, a_link, no_locks])
def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil) -> None:
    spoil(tmp_path / LOCK, monkeypatch)
    (problem,) = started(tmp_path).problems
    assert (problem.key, problem.value) == ("out", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {LOCK}


def test_a_lock_that_cannot_be_read(tmp_path: Path) -> None:
    assert look(tmp_path).held is False
    (tmp_path / LOCK).write_bytes(b"\xff{")
    assert (look(tmp_path).held, look(tmp_path).owner) == (False, None)
    (tmp_path / LOCK).unlink()
    os.mkfifo(tmp_path / LOCK)
    assert look(tmp_path).owner is None, "and it does not wait"
