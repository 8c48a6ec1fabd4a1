"""`make tables`: the sweeps of all tables and figures, then the notebooks and the report page.

    make tables            at most 20 minutes on two cores
    make tables FULL=1     all of MadPipe's instances, and the long runs; what has ended well is not run again

Sweeps that plan or simulate go two at a time, those that measure alone, one after the other. A failure is reported,
and the others continue. The output of each is in runs/tables/SWEEP.log.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from analysis import jobs
from analysis.jobs import Job
from harness.core import units

LOGS = Path("runs") / "tables"
AT_ONCE = 2


def sweep(name: str, scale: str = "", *keys: str, full: bool = False) -> Job:
    """`python run.py -m +sweeps=NAME scale=SCALE KEYS`."""
    scaled = (f"scale={scale}",) if scale else ()
    return Job("-".join(filter(None, (name, scale))), ("run.py", "-m", f"+sweeps={name}", *scaled, *keys), full)


def simulated(full: bool) -> list[Job]:
    """Return the jobs at the papers' scales, the longest first, so that both cores are busy to the end."""
    devices, memory = ((), ()) if full else (("cluster.devices=2,4,8",), ("cluster.memory_gb=4,6,8,12,16",))
    return [
        sweep("myelin_ablation", "paper", full=True),
        sweep("myelin_table2", "paper"),
        sweep("autoddl_fig9"),
        sweep("madpipe_activations", full=True),
        sweep("madpipe_fig7", "", *devices, *memory),
        sweep("madpipe_published", "", *devices, *memory),
        sweep("autoddl_fig8"),
        sweep("autoddl_fig10"),
        sweep("autoddl_table3"),
        sweep("myelin_fig10", "paper"),
        sweep("myelin_fig11", "paper"),
        sweep("schemes", "paper"),
        sweep("torchgpipe_table3", "paper"),
        sweep("torchgpipe_table2", "paper"),
        sweep("madpipe_fig6", "", *devices, *memory),
        sweep("madpipe_fig8", "", *devices),
        *(sweep(f"myelin_{name}", "paper") for name in ("fig5", "fig6", "fig8", "fig9", "table1")),
        sweep("torchgpipe_table4", "paper"),
        sweep("torchgpipe_table1", "paper"),
        *(
            sweep(f"torchgpipe_{name}", "paper")
            for name in ("amoebanet_memory", "resnet101_speed", "resnet101_accuracy")
        ),
        sweep("autoddl_fig3"),
        sweep("autoddl_fig7"),
        sweep("traces", "paper"),
    ]


def measured() -> list[Job]:
    """Return the jobs of scale=local, on this machine; the full ones have committed records, too."""
    return [
        sweep("traces", "local"),
        *(sweep(f"torchgpipe_table{table}", "local", full=table in (2, 3)) for table in (1, 2, 3, 4)),
        *(sweep(f"torchgpipe_{name}", "local", full=True) for name in ("amoebanet_memory", "resnet101_speed")),
        *(sweep(f"myelin_{name}", "local") for name in ("fig5", "fig10", "table2")),
        *(sweep(f"myelin_{name}", "local", full=True) for name in ("fig6", "fig8", "fig11", "table1", "ablation")),
        sweep("autoddl_fig4", full=True),
        sweep("autoddl_table2", full=True),
        sweep("schemes", "local", full=True),
        sweep("myelin_fig9", "local", full=True),
    ]


PAGES = (
    Job("chosen traces", ("-m", "analysis.torchgpipe.traces")),
    Job("notebooks", ("-m", "analysis.notebooks")),
    Job("report page", ("-m", "analysis.page")),
)


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a job failed, and says which, else 0."""
    parser = argparse.ArgumentParser("python -m analysis.make_tables", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all of MadPipe's instances, and the long runs")
    full = parser.parse_args(arguments).full
    began_s = time.monotonic()
    parts = ((chosen(simulated(full), full), AT_ONCE), (chosen(measured(), full), 1), (PAGES, 1))
    ended = [one for part, at_once in parts for one in jobs.run(part, at_once, LOGS)]
    failed = [one.job.name for one in ended if not one.ok]
    print(
        f"{units.age(time.monotonic() - began_s)} in all; " + (f"failed: {', '.join(failed)}" if failed else "all ok")
    )
    return 1 if failed else 0


def chosen(every: Iterable[Job], full: bool) -> list[Job]:
    """Return the jobs for which there is time."""
    return [job for job in every if full or not job.full]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
