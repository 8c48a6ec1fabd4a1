import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.cli.compose import compose
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun
from harness.core.run_files import HANG, MACHINE
from harness.host import machine
from harness.launch import hang, supervisor
from harness.launch.failure import DISK_FULL, DISK_FULL_CODE
from harness.launch.signals import ENDING, Preempted, preemptible
from harness.launch.supervisor import Outcome, WorkerFailed, supervise
from tests.problems import rows

pytestmark = pytest.mark.usefixtures("commands")

ROOT = Path(__file__).parents[3]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    """Whether a process runs, zombies not counted."""
    with suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def pid_in(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def note_pid(path: Path) -> str:
    """Code that writes its process's id, whole, into `path`."""
    return f"import os; open({str(path)!r}, 'w').write(f'{{os.getpid()}}\\n')"


def sleeping(path: Path, before: str = "pass") -> list[str]:
    """A process that writes its id into `path` and sleeps for a minute."""
    return python(f"{before}; {note_pid(path)}; import time; time.sleep(60)")


def test_a_worker_ends_well(tmp_path):
    calls = []
    assert supervise(python("print('a')"), tmp_path, 10, lambda: calls.append(1)) == Outcome("ok")
    assert (tmp_path / "log").read_text() == "a\n"
    assert calls


def test_ranks_see_the_project_from_anywhere_and_a_tuned_malloc(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    code = "import os, harness.core.op, harness; print(harness.__path__[0], os.environ['MALLOC_ARENA_MAX'])"
    assert supervise(python(code), tmp_path, 10) == Outcome("ok")
    assert (tmp_path / "log").read_text().split() == [str(ROOT / "harness"), "1"]


def test_a_failure_is_the_reason_and_ends_what_the_worker_started(tmp_path):
    """The worker starts a process that would sleep for a minute, and fails at once with a message of its own."""
    inner = f"{note_pid(tmp_path / 'pid')}; import time; time.sleep(60)"
    start = f"import subprocess, sys, time, os; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    wait = f"[time.sleep(0.01) for _ in range(500) if not os.path.exists({str(tmp_path / 'pid')!r})]"
    started = time.monotonic()
    outcome = supervise(python(f"{start}; {wait}; raise SystemExit('no luck')"), tmp_path, 30)
    assert outcome == Outcome("error", "the worker ended with exit code 1: no luck")
    assert time.monotonic() - started < 10
    wait_for(lambda: not alive(pid_in(tmp_path / "pid")))


def test_what_a_rank_started_ends_with_it(tmp_path):
    inner = f"{note_pid(tmp_path / 'pid')}; import time; time.sleep(60)"
    outer = f"import subprocess, sys, time, os; subprocess.Popen([sys.executable, '-c', {inner!r}]); " \
            f"[time.sleep(0.01) for _ in range(500) if not os.path.exists({str(tmp_path / 'pid')!r})]"  # fmt: skip
    assert supervise(python(outer), tmp_path, 10) == Outcome("ok")
    wait_for(lambda: not alive(pid_in(tmp_path / "pid")))


HANGING = """
import sys, threading, time
from pathlib import Path
from harness.launch import signal_watcher
signal_watcher.watch(Path(sys.argv[1]), None)
def stuck_thread(): time.sleep(60)
threading.Thread(target=stuck_thread, daemon=True).start()
def stuck_main(): time.sleep(60)
print("started", flush=True)
{before}
stuck_main()
"""


def test_a_worker_that_hangs_writes_its_stacks_and_is_ended(tmp_path):
    outcome = supervise([*python(HANGING.format(before="")), str(tmp_path)], tmp_path, 3.0)
    assert outcome.status == "timeout"
    assert "launch.timeout_s=3 s: the worker made no progress" in outcome.reason
    log = (tmp_path / "log").read_text()
    assert "in stuck_main" in log and "in stuck_thread" in log
    assert not (tmp_path / HANG).exists()


def test_a_worker_that_is_stopped_is_not_said_to_have_written_stacks(tmp_path):
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    outcome = supervise([*python(HANGING.format(before=stop)), str(tmp_path)], tmp_path, 3.0)
    assert outcome.status == "timeout"
    assert outcome.reason.endswith("the worker made no progress and wrote no Python stack: it is stopped (SIGSTOP)")


LATE = """
import itertools, signal, sys
from pathlib import Path
def write(*_):
    (Path(sys.argv[1]) / "hang").mkdir(exist_ok=True)
    for number in itertools.count():
        (Path(sys.argv[1]) / "hang" / f"rank-{number % 999}.json").write_text("{}")
signal.signal(signal.SIGUSR2, write)
while True:
    signal.pause()
"""


def test_what_a_worker_writes_late_about_its_hang_does_not_stay(tmp_path, monkeypatch):
    """Until it is killed: after those who wait for it have gone on."""
    monkeypatch.setattr(hang, "DUMP_S", 0.2)
    assert supervise([*python(LATE), str(tmp_path)], tmp_path, 2.0).status == "timeout"
    assert not (tmp_path / HANG).exists()


def test_a_worker_that_is_killed_leaves_no_memory_of_mpi(tmp_path):
    """Ranks that are stopped while MPI starts have not removed the name of theirs yet."""
    memory = Path(f"/dev/shm/mpich_test_{os.getpid()}")
    before = f"Path({str(memory)!r}).touch()"
    assert supervise([*python(HANGING.format(before=before)), str(tmp_path)], tmp_path, 2.0).status == "timeout"
    assert not memory.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_worker_alone_ends_it(tmp_path, number):
    before = f"import os; os.kill(os.getpid(), {int(number)})"
    outcome = supervise([*python(HANGING.format(before=before)), str(tmp_path)], tmp_path, 30)
    assert outcome.status == "error" and outcome.reason.startswith("the worker")
    assert signal.Signals(number).name in outcome.reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_worker_does_nothing_once_it_is_asked_to_stop(tmp_path, number):
    before = f"import os; Path(sys.argv[1], 'stop').touch(); os.kill(os.getpid(), {int(number)})"
    before += "; time.sleep(3); sys.exit()"
    assert supervise([*python(HANGING.format(before=before)), str(tmp_path)], tmp_path, 30) == Outcome("ok")


def test_a_worker_has_these_signals_blocked_from_its_start(tmp_path):
    code = "import signal; print(*sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))))"
    assert supervise(python(code), tmp_path, 30) == Outcome("ok")
    assert set(map(int, (tmp_path / "log").read_text().split())) >= set(map(int, ENDING))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), "the parent takes them"


@pytest.mark.parametrize(
    ("given", "steps_s", "limit"),
    [
        (5.0, [1.0] * 9, 5.0),
        (900.0, [1.0] * 9, 900.0),
        (None, [], 300.0),
        (None, [0.1, 0.1], 300.0),
        (None, [0.1, 9.0, 0.1], 60.0),
        (None, [5.0, 5.0, 1.0, 6.0], 100.0),
        (None, [90.0] * 5, 300.0),
        (None, [90.0] * 400 + [4.0] * 100, 80.0),
    ],
)
def test_the_time_without_progress_follows_the_steps(given, steps_s, limit):
    """What a user gives is used as it is."""
    assert supervisor.limit_s(given, steps_s) == limit


def test_a_checkpoint_that_grows_is_progress(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    part = str(tmp_path / "checkpoints" / "step-3.part")
    code = f"import time\nfor _ in range(30): time.sleep(0.2); open({part!r}, 'a').write('x')"
    assert supervise(python(code), tmp_path, 3.0) == Outcome("ok")


def test_a_rank_that_writes_is_not_timed_out(tmp_path):
    code = f"import time\nfor _ in range(8): time.sleep(0.2); open({str(tmp_path / 'metrics.jsonl')!r}, 'a').write('x')"
    assert supervise(python(code), tmp_path, 1.0) == Outcome("ok")


def test_a_rank_that_prints_without_end_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOG_BYTES", 20_000)
    code = f"""
import os, time
largest = 0
while (size := os.stat({str(tmp_path / "log")!r}).st_size) >= largest:
    largest = size
    print("y" * 1000, flush=True)
    time.sleep(0.001)
while "are not kept" not in open({str(tmp_path / "log")!r}).read():
    time.sleep(0.001)
print("the end")
"""
    assert supervise(python(code), tmp_path, 10) == Outcome("ok")
    log = (tmp_path / "log").read_text()
    assert "bytes were printed here and are not kept]" in log and log.endswith("the end\n")


@pytest.mark.parametrize("day_s", [86400.0, -86400.0])
def test_a_clock_that_jumps_ends_no_run(tmp_path, monkeypatch, day_s):
    """A day at each look: neither limits nor files' times go by it."""
    jumps, now = itertools.count(1), time.time()
    monkeypatch.setattr(time, "time", lambda: now + day_s * next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * (now + day_s * next(jumps))))
    log = str(tmp_path / "log")
    code = f"import os, time\nfor i in range(8): time.sleep(0.2); os.utime({log!r}, (0, 1e9 - {day_s} * i))"
    assert supervise(python(code), tmp_path, 1.0) == Outcome("ok")


def test_other_files_are_no_progress(tmp_path):
    code = f"import time\nfor _ in range(50): time.sleep(0.1); open({str(tmp_path / 'record.json')!r}, 'a').write('x')"
    assert supervise(python(code), tmp_path, 0.5).status == "timeout"


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [
        (signal.SIGKILL, "error", "by hand"),
        (signal.SIGSEGV, "error", "SIGSEGV"),
        (signal.SIGBUS, "error", "shared memory"),
    ],
)
def test_an_end_by_a_signal(tmp_path, number, status, words):
    outcome = supervise(python(f"import os; os.kill(os.getpid(), {int(number)})"), tmp_path, 10)
    assert outcome.status == status and words in outcome.reason


def failing(tmp_path: Path, raising: str) -> Outcome:
    """How a rank ends that reports an exception as harness.worker.__main__ does."""
    code = f"""
import sys
from pathlib import Path
from harness.launch.failure import Failure
from harness.core.problem import CannotRun, Problem, ProblemError
try:
    {raising}
except BaseException as error:
    Failure.of(error).report(Path({str(tmp_path)!r}))
    sys.exit(1)
"""
    return supervise(python(code), tmp_path, 10)


def test_a_ranks_exception_is_reported_with_its_notes(tmp_path):
    raising = "error = ValueError('bad shape'); error.add_note('in stage 1, layer x, micro-batch 3'); raise error"
    outcome = failing(tmp_path, raising)
    assert outcome == Outcome("error", "ValueError: bad shape\nin stage 1, layer x, micro-batch 3")
    assert "Traceback" in json.loads((tmp_path / "error.json").read_text())["traceback"]


@pytest.mark.parametrize(
    "raising",
    [
        "raise MemoryError",
        "raise type('OutOfMemoryError', (RuntimeError,), {})('CUDA out of memory')",
        "raise RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you tried to allocate 8 bytes')",
    ],
)
def test_lack_of_memory(tmp_path, raising):
    assert failing(tmp_path, raising).status == "oom"


@pytest.mark.parametrize("kind", ["CannotRun([{}])", "ProblemError({})"])
def test_problems_that_only_a_rank_finds(tmp_path, kind):
    """Also those that it finds in a later step."""
    problem = "Problem('model.size', 5, 'is too small', ({'model.size': 64},))"
    outcome = failing(tmp_path, f"error = {kind.format(problem)}; error.add_note('in stage 1'); raise error")
    assert outcome.status == "infeasible"
    assert rows(outcome.problems) == [("model.size", 5, ["model.size=64"])]
    assert outcome.reason.startswith("this run cannot run:") and "model.size=64" in outcome.reason
    assert outcome.reason.endswith("in stage 1")


def test_a_full_disk(tmp_path):
    assert failing(tmp_path, "raise OSError(28, 'No space left on device')") == Outcome("error", DISK_FULL)
    (tmp_path / "error.json").unlink()
    silent = python(f"raise SystemExit({DISK_FULL_CODE})")
    assert supervise(silent, tmp_path, 10) == Outcome("error", DISK_FULL)


def test_a_command_that_is_not_there(tmp_path):
    outcome = supervise(["/no/such/program"], tmp_path, 10)
    assert outcome.status == "error" and "/no/such/program" in outcome.reason


@contextmanager
def signalled_after(path: Path, *numbers: int):
    """Send this process signals, one after the other, once `path` is there."""

    def send() -> None:
        pid_in(path)
        for number in numbers:
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_ranks_and_reaches_the_caller_once(tmp_path, number):
    sleeper = sleeping(tmp_path / "pid")
    with preemptible(), signalled_after(tmp_path / "pid", number, number), \
            pytest.raises(Preempted, match=signal.Signals(number).name):  # fmt: skip
        supervise(sleeper, tmp_path, 30)
    assert not alive(pid_in(tmp_path / "pid"))


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
    sleeper = sleeping(tmp_path / "pid", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with preemptible(), signalled_after(tmp_path / "pid", signal.SIGINT), pytest.raises(Preempted):
        supervise(sleeper, tmp_path, 30)
    assert not alive(pid_in(tmp_path / "pid"))


def test_handlers_are_put_back_and_can_be_switched_off():
    former = signal.getsignal(signal.SIGTERM)
    with preemptible() as signals:
        signals.ignored = True
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is former


def test_ranks_die_with_a_parent_that_is_killed(tmp_path):
    """The parent has no chance to tidy up: the kernel does."""
    supervising = f"supervise({sleeping(tmp_path / 'pid')!r}, Path({str(tmp_path)!r}), 60)"
    code = f"from pathlib import Path; from harness.launch.supervisor import supervise; {supervising}"
    parent = subprocess.Popen(python(code), cwd=ROOT)
    rank = pid_in(tmp_path / "pid")
    assert alive(rank)
    parent.kill()
    parent.wait()
    wait_for(lambda: not alive(rank))


# -- a worker of a run


def folder(path: Path, *typed: str) -> Path:
    """A run's folder with its configuration."""
    (path / "config.yaml").write_text(OmegaConf.to_yaml(compose(typed), resolve=True))
    return path


def test_problems_come_back_as_problems(tmp_path: Path) -> None:
    ModelProfile((LayerProfile(),), "other").save(tmp_path / "p.json")
    run = folder(tmp_path, f"profile={tmp_path / 'p.json'}")
    ModelProfile.load(tmp_path / "p.json").save(tmp_path / "profile.json")
    with pytest.raises(CannotRun) as caught:
        supervisor.run_worker(run, "this title", 60, "check")
    assert caught.value.title == "this title"
    assert caught.value.problems[0].message == "is of other, the model is unet_2_16_128"


def test_another_end_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        supervisor.run_worker(folder(tmp_path), "title", 60, "count", "many")
    assert caught.value.outcome.status == "error"
    assert "ValueError: invalid literal" in caught.value.outcome.reason


@pytest.mark.usefixtures("commands")
def test_this_machine_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    run = folder(tmp_path, "cluster.device=cpu")
    found = supervisor.measure_machine(run, "title", 60, "cpu")
    assert found.device.peak_flops["float32"] > 0 and found.link.beta_s_per_byte > 0
    assert machine.stored("cpu") == found
    assert not (run / MACHINE).exists()


@pytest.mark.parametrize(
    ("action", "result"),
    [("train", "result.json"), ("train", "stop"), ("profile", "profile.json"), ("count", "profile.json"),
     ("machine", "machine.json"), ("calibrate", "timings.json")],
)  # fmt: skip
def test_a_worker_without_a_result_has_not_done_its_work(tmp_path, monkeypatch, action, result):
    """`os._exit(0)` in a user's code is no good end; an old result is none of this worker's."""
    run = folder(tmp_path)
    does, quits = tmp_path / "does", tmp_path / "quits"
    does.write_text(f"#!/bin/sh\ntouch {run / result}\n")
    quits.write_text("#!/bin/sh\nexit 0\n")
    for script in (does, quits):
        script.chmod(0o755)
    monkeypatch.setattr(supervisor.sys, "executable", str(does))
    supervisor.run_worker(run, "title", 60, action)
    if result == "stop":
        (run / result).unlink()
    monkeypatch.setattr(supervisor.sys, "executable", str(quits))
    with pytest.raises(WorkerFailed, match="ended with exit code 0 before it had a result") as caught:
        supervisor.run_worker(run, "title", 60, action)
    assert caught.value.outcome.status == "error"
