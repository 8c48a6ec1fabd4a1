"""Workers forked from one process that has loaded torch, the fork server: loading it takes two seconds.

    run.py, or a sweep --start--> python -m harness.worker serve     loads torch once
         |                           |
    supervise ------- words, log --->|--fork--> worker               does its action, as one that is started alone
         ^                           |            |
         '------ its id, at its end its exit code-'

A run starts a server for what it measures before it trains, a sweep one for all of its points. Other processes find it
by an environment variable, and use it if they have its environment and limits, which its workers inherit.
Whoever has no server, or gets no answer, starts a worker by itself.

The server ends with the process that has started it, its workers end with it, and a worker ends with its client.

Searches that run at the same time need no torch, but all that their parent has loaded: their server is the parent
itself, forked (`forked`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, NoReturn

from harness.launch import die_with_parent
from harness.launch.signals import ENDING, blocked

VARIABLE = "REGATTA_FORK_SERVER"
"""Says to other processes the name of the server's socket, and for which surroundings it is."""
OWN, UNREAD = "REGATTA_", ("COLUMNS", "LINES", "PYTEST_CURRENT_TEST")
"""Variables that nothing reads while torch is loaded: this project's own, by their beginning, and some others."""
ANSWER_S = 60.0
"""Seconds that a client waits for a worker: the server may still load torch."""
MOST_BYTES, MOST_FILES = 1 << 20, 8
STDIN = 0
_LIMITS = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
_scopes: list[ExitStack] = []


class ForkedWorker:
    """A worker of the server: what `subprocess.Popen` is for one that is started alone."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. If the server has been killed, so has it. Raises
        `subprocess.TimeoutExpired` where it runs for longer than `timeout` seconds."""
        if self.returncode is None:
            if not select.select([self.connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self.connection:
                self.returncode = int(self.connection.recv(MOST_BYTES) or -signal.SIGKILL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@contextmanager
def scope() -> Iterator[None]:
    """A server that is started within it ends with the outermost scope; one next to another server, for
    other surroundings, ends with the innermost.
    """
    with ExitStack() as stack:
        _scopes.append(stack)
        try:
            yield
        finally:
            _scopes.pop()


def start(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a server, if this is within a scope and there is none yet: `command` is a worker's, without its words."""
    if not _scopes or _name():
        return
    before = os.environ.get(VARIABLE)
    with _listening() as (name, listener), blocked():
        server = subprocess.Popen(
            [*die_with_parent.prefix(), *command, "serve", str(listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    os.environ[VARIABLE] = f"{name} {_surroundings()}"
    _scopes[0 if before is None else -1].callback(_end, server, before)


def _end(server: subprocess.Popen[bytes], before: str | None) -> None:
    """End the server, and put back the variable as it was `before`."""
    del os.environ[VARIABLE]
    os.environ |= {} if before is None else {VARIABLE: before}
    assert server.stdin
    server.stdin.close()
    server.kill()
    server.wait()


@contextmanager
def _listening() -> Iterator[tuple[str, socket.socket]]:
    """The name of a new socket, and it."""
    name = f"regatta-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")  # a name that is no file's: nothing is left of it
        listener.listen()
        yield name, listener


@contextmanager
def forked(work: Callable[[list[str]], int]) -> Iterator[str]:
    """A server that is this process, forked with all that it has loaded and made; the name, for `ask`.

    A worker exits with what `work` returns for its words, or with 1 and a traceback. It takes signals as a process that
    is started alone. To be called while this process has no other threads.
    """
    parent, (alive, end) = os.getpid(), os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else its workers had what is in it, too
    server = 0
    try:
        with _listening() as (name, listener), blocked():
            server = os.fork()
            if server == 0:
                os.close(end)
                _become_server(parent, alive, listener, work)
        yield name
    finally:
        os.close(alive)
        os.close(end)
        if server:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def _become_server(parent: int, alive: int, listener: socket.socket, work: Callable[[list[str]], int]) -> NoReturn:
    """Serve until the other end of the pipe `alive` is closed; in the workers, do their work. Never returns to what the
    parent was at."""
    code = 1
    try:
        die_with_parent.die_with(parent)
        os.setsid()
        if alive != STDIN:
            os.dup2(alive, STDIN)
            os.close(alive)
        _scopes.clear()
        gc.freeze()
        words = _Server(listener).serve()
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        streams = (os.fdopen(number, "w", 1, "utf-8", "backslashreplace", closefd=False) for number in (1, 2))
        sys.stdout, sys.stderr = streams
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        code = work(words)
    except SystemExit:  # the server's end
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def fork(
    words: Sequence[str], log: IO[bytes], environment: Mapping[str, str], inherits: Mapping[str, int]
) -> ForkedWorker | None:
    """Have the server of this process's surroundings fork a worker, as `ask` does; None where there is none."""
    name = _name()
    return ask(name, words, log, environment, inherits) if name else None


def ask(
    name: str, words: Sequence[str], log: IO[bytes], environment: Mapping[str, str], inherits: Mapping[str, int]
) -> ForkedWorker | None:
    """Have the server of this name fork a worker; None where it does not answer.

    Its output goes to `log`. It `inherits` descriptors, each by the environment variable that says its number.
    """
    request = {
        "words": list(words),
        "folder": os.getcwd(),
        "environment": dict(environment),
        "inherits": list(inherits),
    }
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(f"\0{name}")
            socket.send_fds(connection, [json.dumps(request).encode()], [log.fileno(), *inherits.values()])
            answer, _, pid = connection.recv(MOST_BYTES).decode().partition(" ")
        except OSError:
            return None
        if answer != "forked" or not same_user(connection):
            return None
        connection.settimeout(None)
        stack.pop_all()
        return ForkedWorker(connection, int(pid))


def _name() -> str:
    """The name of the server's socket; empty where there is none for this process's surroundings."""
    name, _, surroundings = os.environ.get(VARIABLE, "").partition(" ")
    return name if name and surroundings == _surroundings() else ""


def _surroundings() -> str:
    """A digest of what a process inherits: its variables, where it finds modules, its limits and its cores."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN) and name not in UNREAD}
    path = environment.get("PYTHONPATH")
    places = [os.path.abspath(place) for place in path.split(os.pathsep)] if path else []
    limits = [resource.getrlimit(getattr(resource, name)) for name in _LIMITS]
    seen = [sys.executable, __file__, places, sorted(os.sched_getaffinity(0)), limits, environment]
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16]


def same_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user: every user of the machine can see the socket."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def serve(descriptor: int) -> list[str]:
    """Load torch, then fork a worker for each client of the socket `descriptor`, until stdin ends.

    Returns in the workers alone: the words that say what the worker is to do.
    """
    import torch._dynamo  # noqa: F401  half of it; optimizers and profiles import it at their first call

    gc.collect()
    gc.freeze()  # else a worker's first garbage collection copies every page that it shares with the server
    return _Server(socket.socket(fileno=descriptor)).serve()


class _Server:
    def __init__(self, listener: socket.socket) -> None:
        self.listener, self.pid = listener, os.getpid()
        self.workers: dict[int, socket.socket] = {}
        """The client of each worker, by the worker's id."""
        self.woken, self.wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> list[str]:
        while True:
            waiting = select.poll()
            for readable in (STDIN, self.listener.fileno(), self.woken):
                waiting.register(readable, select.POLLIN)
            for client in self.workers.values():
                waiting.register(client, select.POLLRDHUP)
            events = dict(waiting.poll())
            if STDIN in events:
                sys.exit()
            with suppress(BlockingIOError):
                os.read(self.woken, MOST_BYTES)
            self.collect()
            for pid, client in self.workers.items():
                if client.fileno() in events:
                    _kill_group(pid)
            if self.listener.fileno() in events:
                client, _ = self.listener.accept()
                if (pid := os.fork()) == 0:
                    return self.worker(client)
                self.workers[pid] = client

    def collect(self) -> None:
        """Say to the clients of workers that have ended how; what these had started ends, too."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self.workers and (ended := os.waitid(os.P_ALL, 0, how)):
            _kill_group(ended.si_pid)  # its id is not another process's before it is collected
            code = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
            with self.workers.pop(ended.si_pid) as client, suppress(OSError):
                client.send(str(code).encode())

    def worker(self, client: socket.socket) -> list[str]:
        """Be the worker of a client: in a process group of its own, with the client's environment and log."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent.die_with(self.pid)
        os.setsid()
        for other in (*self.workers.values(), self.listener):
            other.close()
        for end in (self.woken, self.wake):
            os.close(end)
        try:
            client.settimeout(ANSWER_S)
            message, (log, *given), _, _ = socket.recv_fds(client, MOST_BYTES, MOST_FILES)
            request = json.loads(message)
            if not same_user(client):
                os._exit(1)
            client.send(f"forked {os.getpid()}".encode())
        except (OSError, ValueError):  # the client has gone
            os._exit(1)
        client.close()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        for output in (1, 2):
            os.dup2(log, output)
        os.close(log)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ |= request["environment"] | dict(zip(request["inherits"], map(str, given), strict=True))
        words: list[str] = request["words"]
        return words


def _kill_group(pid: int) -> None:
    """Kill a worker with all that it has started; it may not have made its group yet."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
