"""Find how a Slurm step ended from the messages of srun and the nodes' daemons: the first end is the cause.

    srun: error: node2: task 3: Segmentation fault                                 a rank, by itself
    srun: error: node1: task 0: Out Of Memory                                      its control group was full
    srun: error: Node failure on node2
    slurmstepd-node1: error: *** STEP 3.0 ON node1 CANCELLED AT 2026-11-22T10:54:52 DUE TO TIME LIMIT ***

Ranks that torchrun has started have no srun: their own parents write such lines (`task_line`).

    launch: error: node2: task 3: Killed

Once a rank has failed, srun ends all others and prints their ends, too: later lines follow from the first.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from harness.core.record import Status

SLURM = ("srun: ", "slurmstepd", "slurmd", "launch: ")
"""Prefixes of Slurm's own lines in the log."""
TASK = re.compile(r"^(?P<who>srun|launch): error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)$", re.MULTILINE)
CANCELLED = re.compile(r"^\S+: error: \*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?P<why>.*?)\*\*\*", re.MULTILINE)
NODE = re.compile(
    r"^\S+: error: (?P<what>Node failure on \S+|Task launch for \S+ failed on node .*|.*DUE TO NODE FAILURE.*)$",
    re.MULTILINE,
)
ERROR = re.compile(r"^srun: error: (?P<what>.+)$", re.MULTILINE)
NO_NODES = "Unable to (create step|allocate|contact)|Requested nodes are busy|(Socket|Connection) timed out"
HOST = re.compile(r"^launch: error: (?P<what>.+)$", re.MULTILINE)
EXITED = "Exited with exit code"
TERMINATED = "Terminated"
"""By SIGTERM, which srun sends to all ranks once one has failed."""
NO_ADDRESSES = "MPIDI_UCX_comm_addr_exchange"
"""Message of mpich when MPI_Init did not receive all addresses of the others, which is rare and works the next time:
https://github.com/pmodels/mpich/issues/7417."""


@dataclass(frozen=True)
class StepEnd:
    """What ended a step. `rank` None: no rank did; `by_signal`: that rank could not report anything itself;
    `killed`: the signal was 9; `started`: ranks may have taken a step; `exit_code`: that of a rank that exited."""

    status: Status
    reason: str
    rank: int | None = None
    by_signal: bool = False
    started: bool = True
    killed: bool = False
    exit_code: int | None = None


def step_end(output: str, rank_name: Callable[[int], str], waited_s: float) -> StepEnd | None:
    """Return how the step whose log is `output` ended; None if Slurm's messages do not say.

    `rank_name(3)` is "rank 3, stage 1", `waited_s` is how long srun waits for nodes.
    """
    tasks = [(match.start(), _task_end(match, rank_name)) for match in TASK.finditer(output)]
    if out_of_memory := [end for _, end in tasks if end.status == "oom"]:
        return out_of_memory[0]
    if lost := NODE.search(output):
        return StepEnd("node_lost", f"{lost['what']}: the job lost a node")
    cancelled = [(match.start(), _cancelled(match["why"].strip())) for match in CANCELLED.finditer(output)]
    if first := min(tasks + cancelled, key=lambda end: end[0], default=None):
        return first[1]
    if host := HOST.search(output):
        return StepEnd("error", host["what"], by_signal=True)
    if errors := ERROR.findall(output):
        return _srun_error(errors[-1], bool(last_line(output)), waited_s)
    return None


def killed_end(output: str, rank_name: Callable[[int], str]) -> StepEnd | None:
    """Return the first end by a signal that srun did not send itself, also after other ends; None if there is none.

    A node's daemon reports it late at times, after a rank that has lost its connection to this one has failed.
    """
    ends = (_task_end(match, rank_name) for match in TASK.finditer(output) if match["how"].strip() != TERMINATED)
    return next((end for end in ends if end.by_signal), None)


def task_line(node: str, rank: int, code: int, how: str = "") -> str:
    """Return the line that says how a rank ended without srun: with exit code `code`, or by signal -`code`."""
    said = how or (f"{EXITED} {code}" if code > 0 else signal.strsignal(-code))
    return f"launch: error: {node}: task {rank}: {said}\n"


def last_line(output: str) -> str:
    """The last line that is not Slurm's own; "" if there is none."""
    lines = [line for line in output.strip().splitlines() if not line.startswith(SLURM)]
    return lines[-1] if lines else ""


def _task_end(match: re.Match[str], rank_name: Callable[[int], str]) -> StepEnd:
    rank, how = int(match["rank"]), match["how"].strip()
    who = f"{rank_name(rank)} on {match['node']}"
    if "out of memory" in how.lower() or "OOM" in how:
        what = "was killed: the memory of its control group was full"
        return StepEnd("oom", f"{who} {what} ({how})", rank, by_signal=True, killed=True)
    if how == "Killed":
        no_reason = ", and Slurm reports no lack of memory" if match["who"] == "srun" else ""
        what = f"was killed (signal 9){no_reason}: by hand, or by that node's kernel"
        return StepEnd("error", f"{who} {what}", rank, by_signal=True, killed=True)
    if EXITED in how:
        started = NO_ADDRESSES not in match.string
        code = int(how.rpartition(" ")[2])
        return StepEnd("error", f"{who} ended with exit code {code}", rank, started=started, exit_code=code)
    return StepEnd("error", f"{who} ended by a signal: {how}", rank, by_signal=True)


def _cancelled(why: str) -> StepEnd:
    if "TIME LIMIT" in why:
        return StepEnd("timeout", "Slurm's time limit for the job was over")
    if "PREEMPTION" in why:
        return StepEnd("preempted", "Slurm gave the nodes to another job")
    return StepEnd("preempted", "Slurm cancelled the ranks: by scancel, or at the end of the job")


def _srun_error(error: str, printed: bool, waited_s: float) -> StepEnd:
    """An error of srun that is of no rank. Ranks that have `printed` something had started: no step is done twice."""
    if printed:
        return StepEnd("error", f"srun lost the ranks, which had started: {error}")
    if re.search(NO_NODES, error):
        what = f"srun had no nodes of the job for the ranks within {waited_s:g} s: {error}"
        return StepEnd("error", f"{what} -> end the job's other steps, or launch.ranks=fork", started=False)
    return StepEnd("error", f"srun started no ranks: {error}")
