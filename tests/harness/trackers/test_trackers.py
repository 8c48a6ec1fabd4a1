from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from harness.core.problem import CannotRun
from harness.trackers import Guarded, Tracker, none, wandb
from tests.problems import refused, rows

pytestmark = pytest.mark.usefixtures("commands")

ROOT = Path(__file__).resolve().parents[3]

# Two runs, one after the other in one process, as simulated points of a sweep have them.
TWO_RUNS = """
import os, sys
from pathlib import Path
from harness.trackers import wandb

before = dict(os.environ)
for name, status in (("first", "ok"), ("second", "oom")):
    tracker = wandb.build(wandb.Config())
    tracker.start(f"id-{name}", "a-sweep", "gpipe", ["unet", "local", "m" * 80], {"batch": {"size": 16}}, Path(name))
    for step in range(3):
        tracker.log(step, {"loss": 1 / (step + 1), "utilization": [0.5, 0.25], "peak_memory_bytes": None})
    pictures = {"timeline": Path("timeline.png"), "none": Path("no.png")}
    tracker.finish({"loss": 0.125, "step_time_s": 0.5}, pictures, status)
assert dict(os.environ) == before
sys.exit(os.getcwd() != os.environ["HERE"])
"""


class Server:
    """Accepts connections and never says a word: what a network that swallows packets looks like."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.connections.append(self._socket.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def environment(server: Server, home: Path, **more: str) -> dict[str, str]:
    """Everything that could reach the network reaches `server`: W&B's own server and both proxies."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "XDG"))}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), server.url)
    return {**kept, **proxies, "WANDB_BASE_URL": server.url, "HOME": str(home), "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1", **more}  # fmt: skip


def wandb_command(*arguments: str, home: Path, cwd: Path) -> str:
    command = [sys.executable, "-m", "wandb", *arguments]
    env = {**os.environ, "HOME": str(home)}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def two_runs(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which TWO_RUNS ran, and the empty home directory next to it."""
    here = tmp_path_factory.mktemp("runs")
    (here / "home").mkdir()
    Image.new("RGB", (8, 8)).save(here / "timeline.png")
    env = environment(server, here / "home", HERE=str(here))
    command = [sys.executable, "-c", TWO_RUNS]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return here


def run_file(folder: Path) -> Path:
    """The one W&B file below a run's folder, where `wandb sync` looks for it."""
    (found,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    return found


def test_offline_makes_no_connection_and_leaves_the_home_directory_alone(two_runs: Path, server: Server) -> None:
    assert server.connections == []
    assert list((two_runs / "home").iterdir()) == []
    assert sorted(path.name for path in two_runs.iterdir()) == ["first", "home", "second", "timeline.png"]
    assert [path.name for path in (two_runs / "second").iterdir()] == ["wandb"]


def test_offline_file_holds_config_history_and_summary(two_runs: Path) -> None:
    text = wandb_command("leet", "inspect", "--json", str(run_file(two_runs / "first")), home=two_runs, cwd=two_runs)
    records: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    run = next(record["run"] for record in records if record["type"] == "run")
    assert (run["run_id"], run["run_group"], run["job_type"]) == ("id-first", "a-sweep", "gpipe")
    assert (run["project"], run["host"]) == ("regatta", socket.gethostname())
    assert run["tags"] == ["unet", "local", "m" * 64]
    assert run["config"]["update"]["batch"] == {"size": 16}
    assert next(record["exit"]["exit_code"] for record in records if record["type"] == "exit") == 0
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("loss") for row in rows] == [1, 0.5, pytest.approx(1 / 3), None]
    assert rows[0]["utilization/1"] == 0.25
    assert "peak_memory_bytes" not in rows[0]
    assert rows[3]["timeline._type"] == "image-file"
    kinds = {record["type"] for record in records}  # nothing of the console, the code, the machine or its packages
    assert kinds == {"header", "run", "telemetry", "history", "summary", "files", "exit"}


def test_summary_is_what_finish_was_given(two_runs: Path) -> None:
    path = run_file(two_runs / "second")
    found = json.loads(wandb_command("leet", "inspect", "--summary", "--json", str(path), home=two_runs, cwd=two_runs))
    assert (found["run_id"], found["exit_code"]) == ("id-second", 1)
    summary = found["summary"]
    assert (summary["loss"], summary["step_time_s"], summary["status"]) == (0.125, 0.5, "oom")
    assert (path.parent / "files" / summary["timeline"]["path"]).is_file()


def test_wandb_sync_would_take_the_folder(two_runs: Path) -> None:
    said = wandb_command("sync", "--dry-run", "wandb", home=two_runs / "home", cwd=two_runs / "first")
    assert "Would sync 1 run(s)" in said
    assert "run-id-first.wandb" in said


KILLED = """
import os, signal, time
from pathlib import Path
from harness.trackers import wandb
tracker = wandb.build(wandb.Config())
tracker.start("x", "", "gpipe", [], {}, Path("run"))
for step in range(3):
    tracker.log(step, {"loss": 1.0})
time.sleep(1.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_hard_kill_loses_about_a_second(server: Server, tmp_path: Path) -> None:
    env = environment(server, tmp_path)
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=env, check=False).returncode == -9
    text = wandb_command("leet", "inspect", "--json", str(run_file(tmp_path / "run")), home=tmp_path, cwd=tmp_path)
    records = [json.loads(entry) for entry in text.splitlines()]
    assert [record["history"]["step"]["num"] for record in records if record["type"] == "history"] == [0, 1, 2]


ONLINE = """
from pathlib import Path
from harness.trackers import wandb
tracker = wandb.build(wandb.Config(mode="online", timeout_s=1))
tracker.start("x", "", "gpipe", [], {}, Path("run"))
tracker.log(0, {"loss": 1.0})
tracker.finish({}, {}, "ok")
"""


def online(server: Server, folder: Path, **more: str) -> tuple[int, list[str], float]:
    start = time.monotonic()
    command, env = [sys.executable, "-c", ONLINE], environment(server, folder / "home", **more)
    done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, timeout=60,
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.returncode, done.stderr.splitlines(), time.monotonic() - start


def test_online_gives_up_on_a_server_that_does_not_answer(server: Server, tmp_path: Path) -> None:
    connected = len(server.connections)
    code, said, took_s = online(server, tmp_path, WANDB_API_KEY="a" * 40)
    assert len(server.connections) > connected  # so the server above does see what goes to the network
    assert (code, len(said)) == (0, 1)
    assert "tracker wandb (tracker.mode=online) failed and is left out of this run: " in said[0]
    assert "deadline exceeded" in said[0] or "Timed out" in said[0]
    assert took_s < 20


def test_online_without_a_key_says_what_to_do(server: Server, tmp_path: Path) -> None:
    connected = len(server.connections)
    code, said, _ = online(server, tmp_path)
    assert (code, len(said), len(server.connections)) == (0, 1, connected)
    assert "tracker.mode online needs an API key: run `wandb login`, or use tracker.mode=offline" in said[0]


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wandb").write_text("in the way")
    tracker = wandb.build(wandb.Config())
    tracker.start("x", "", "gpipe", [], {}, tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.finish({}, {}, "ok")
    assert len(caplog.records) == 1
    assert "File exists" in caplog.text
    assert "-> tracker=none" in caplog.text


class Broken:
    """Fails in one of its methods and counts the calls."""

    def __init__(self, fails_in: str) -> None:
        self.fails_in = fails_in
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_in:
            raise OSError(f"{name} is out of order\nand more")

    def start(self, *_: Any) -> None:
        self._call("start")

    def log(self, *_: Any) -> None:
        self._call("log")

    def finish(self, *_: Any) -> None:
        self._call("finish")


@pytest.mark.parametrize(
    ("fails_in", "calls"),
    [
        ("start", ["start"]),
        ("log", ["start", "log"]),
        ("finish", ["start", "log", "log", "finish"]),
        ("", ["start", "log", "log", "finish"]),
    ],
)
def test_guarded_warns_once_and_leaves_the_tracker_alone(
    fails_in: str, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(fails_in)
    tracker: Tracker = Guarded("broken", broken)
    tracker.start("x", "", "", [], {}, Path())
    tracker.log(0, {})
    tracker.log(1, {})
    tracker.finish({}, {}, "ok")
    assert broken.calls == calls
    lines = [f"tracker broken failed and is left out of this run: {fails_in} is out of order -> tracker=none"]
    assert caplog.messages == (lines if fails_in else [])
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_guarded_lets_ctrl_c_through() -> None:
    class Interrupted(Broken):
        def log(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded("interrupted", Interrupted("")).log(0, {})


def test_flat() -> None:
    nested = {"loss": 1.0, "peak": [1, None, 3], "sent": {"copy": 5, "skip": {"up": 6}}, "none": None}
    assert wandb.flat(nested) == {"loss": 1.0, "peak/0": 1, "peak/2": 3, "sent/copy": 5, "sent/skip/up": 6}


def test_wrong_values_are_refused_all_at_once() -> None:
    with pytest.raises(CannotRun) as caught:
        wandb.build(wandb.Config(mode="ofline", timeout_s=0.0))
    assert rows(refused(caught)) == [
        ("tracker.mode", "ofline", ["tracker.mode=offline"]),
        ("tracker.timeout_s", 0.0, ["tracker.timeout_s=30"]),
    ]


@pytest.mark.parametrize("tracker", [none.build(none.Config()), wandb.build(wandb.Config(mode="disabled"))])
def test_no_tracker_leaves_nothing(tracker: Tracker, tmp_path: Path) -> None:
    tracker.start("x", "", "", [], {}, tmp_path)
    tracker.log(0, {"loss": 1.0})
    tracker.finish({}, {}, "ok")
    assert list(tmp_path.iterdir()) == []


def test_wandb_is_imported_by_a_run_only() -> None:
    code = "import sys; from harness.trackers import wandb as w; w.build(w.Config()); sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
