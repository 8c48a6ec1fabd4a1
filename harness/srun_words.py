"""How a step of Slurm ended, from what srun and the nodes' daemons say on its way: the first one to end is the cause.

    srun: error: node2: task 3: Segmentation fault                                 a rank, by itself
    srun: error: node1: task 0: Out Of Memory                                      its control group was full
    srun: error: Node failure on node2
    slurmstepd-node1: error: *** STEP 3.0 ON node1 CANCELLED AT 2026-11-22T10:54:52 DUE TO TIME LIMIT ***

Once a rank has failed srun ends all others, and tells of them, too: later lines follow from the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from harness.record import Status

OWN = ("srun: ", "slurmstepd", "slurmd")
"""How lines of Slurm begin among those of the ranks."""
TASK = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<rank>\d+)\S*: (?P<how>.+)$", re.MULTILINE)
CANCELLED = re.compile(r"^\S+: error: \*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?P<why>.*?)\*\*\*", re.MULTILINE)
NODE = re.compile(
    r"^\S+: error: (?P<what>Node failure on \S+|Task launch for \S+ failed on node .*|.*DUE TO NODE FAILURE.*)$",
    re.MULTILINE,
)
ERROR = re.compile(r"^srun: error: (?P<what>.+)$", re.MULTILINE)
NO_NODES = "Unable to (create step|allocate|contact)|Requested nodes are busy|(Socket|Connection) timed out"
DISK_FULL = re.compile(r"Exited with exit code 28$")
ENDED = re.compile(r"Exited with exit code")
NO_ADDRESSES = "MPIDI_UCX_comm_addr_exchange"
"""Where mpich gives up in MPI_Init if the addresses of the others have not come whole, which is rare, and gone the next
time: https://github.com/pmodels/mpich/issues/7417."""


@dataclass(frozen=True)
class End:
    """What ended a step. `rank` None: no rank did; `by_signal`: that rank could not say anything itself;
    `killed`: the signal was 9; `begun`: ranks may have taken a step."""

    status: Status
    reason: str
    rank: int | None = None
    by_signal: bool = False
    begun: bool = True
    killed: bool = False


def end(said: str, named: Callable[[int], str], waited_s: float) -> End | None:
    """How the step ended of which `said` is the log; None: Slurm says nothing of it.

    `named(3)` says which rank 3 is ("rank 3, stage 1"), `waited_s` is how long srun waits for nodes.
    """
    tasks = [(match.start(), _of_task(match, named)) for match in TASK.finditer(said)]
    if full := [found for _, found in tasks if found.status == "oom"]:
        return full[0]
    if lost := NODE.search(said):
        return End("node_lost", f"{lost['what']}: the job lost a node")
    cancelled = [(match.start(), _cancelled(match["why"].strip())) for match in CANCELLED.finditer(said)]
    if first := min(tasks + cancelled, key=lambda found: found[0], default=None):
        return first[1]
    if errors := ERROR.findall(said):
        return _lost(errors[-1]) if last_line(said) else _not_begun(errors[-1], waited_s)
    return None


def last_line(said: str) -> str:
    """The last line that is not Slurm's own; "" if there is none."""
    lines = [line for line in said.strip().splitlines() if not line.startswith(OWN)]
    return lines[-1] if lines else ""


def _of_task(match: re.Match[str], named: Callable[[int], str]) -> End:
    rank, how = int(match["rank"]), match["how"].strip()
    who = f"{named(rank)} on {match['node']}"
    if "out of memory" in how.lower() or "OOM" in how:
        what = "was killed: the memory of its control group was full"
        return End("oom", f"{who} {what} ({how})", rank, True, killed=True)
    if how == "Killed":
        what = "was killed (signal 9), and Slurm tells of no lack of memory: by hand, or by that node's kernel"
        return End("error", f"{who} {what}", rank, True, killed=True)
    if ENDED.search(how):
        begun = NO_ADDRESSES not in match.string
        return End("error", f"{who} ended with {how.removeprefix('Exited with ')}", rank, begun=begun)
    return End("error", f"{who} ended by a signal: {how}", rank, True)


def _cancelled(why: str) -> End:
    if "TIME LIMIT" in why:
        return End("timeout", "Slurm's time limit for the job was over")
    if "PREEMPTION" in why:
        return End("preempted", "Slurm gave the nodes to another job")
    return End("preempted", "Slurm cancelled the ranks: by scancel, or at the end of the job")


def _lost(error: str) -> End:
    """The ranks have printed something: they were there, and what they did is not to be done twice."""
    return End("error", f"srun lost the ranks, which had begun: {error}")


def _not_begun(error: str, waited_s: float) -> End:
    if re.search(NO_NODES, error):
        what = f"srun had no nodes of the job for the ranks within {waited_s:g} s: {error}"
        return End("error", f"{what} -> end the job's other steps, or launch.ranks=fork", begun=False)
    return End("error", f"srun started no ranks: {error}")
