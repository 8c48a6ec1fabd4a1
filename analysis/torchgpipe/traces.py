"""Chosen traces, one step each, that the report page and torchgpipe's Figure 7 show: analysis/results/traces.

    python run.py -m +sweeps=traces                     small runs on this machine
    python run.py -m +sweeps=traces scale=paper         a pipeline on a described cluster
    python run.py -m +sweeps=torchgpipe_table1          torchgpipe's Table 1
    python -m analysis.torchgpipe.traces                takes their last steps into analysis/results/traces

A sweep has a folder of its own there: index.json names its traces in order, each a Chrome trace, gzipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.timelines import NoTrace, panels
from analysis.torchgpipe.sweep_results import ROWS
from harness.config import registry
from harness.core import files
from harness.core.trace import Trace

TRACES = registry.ROOT / "analysis" / "results" / "traces"
RUNS = Path("runs")
INDEX = "index.json"
TITLES: dict[str, tuple[str, ...] | None] = {
    "traces-local": None,
    "traces-paper": None,
    "torchgpipe_table1-paper": ROWS[1],
}
"""The sweeps' folders in runs/, and the paper's names of their points; None: the keys in which points differ."""


@dataclass(frozen=True)
class Chosen:
    """A trace of one step with its title, from a sweep."""

    sweep: str
    title: str
    trace: Trace


def load(sweep: str) -> list[Chosen]:
    """The chosen traces of a sweep, in order; none where there are none."""
    index = TRACES / sweep / INDEX
    if not index.is_file():
        return []
    entries = json.loads(index.read_text(encoding="utf-8"))
    return [Chosen(sweep, one["title"], Trace.load(index.parent / one["file"])) for one in entries]


def choose(sweep: str, folder: Path) -> int:
    """Take the traces of a sweep's runs in `folder`; returns how many. Raises NoTrace where there is none."""
    drawn = panels([folder], titles=TITLES[sweep])
    entries = []
    for number, (title, trace) in enumerate(drawn):
        name = f"{number}.trace.json.gz"
        _from_zero(trace).save(TRACES / sweep / name)
        entries.append({"title": title, "file": name})
    files.write_text(TRACES / sweep / INDEX, json.dumps(entries, indent=1) + "\n")
    return len(drawn)


def _from_zero(trace: Trace) -> Trace:
    """Return the same trace with a clock that begins with the step."""
    start_s = trace.steps[0][0] if trace.steps else min(span.start_s for span in trace.spans)
    spans = (replace(span, start_s=span.start_s - start_s, end_s=span.end_s - start_s) for span in trace.spans)
    return Trace(tuple(spans), tuple((begin - start_s, end - start_s) for begin, end in trace.steps))


def main(arguments: Sequence[str]) -> int:
    """Returns 2 if a sweep has no traces, which is said; else 0."""
    argparse.ArgumentParser(
        "python -m analysis.torchgpipe.traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    missing = []
    for sweep in TITLES:
        try:
            print(f"{TRACES / sweep}: {choose(sweep, RUNS / sweep)} traces")
        except NoTrace as error:
            missing.append(str(error))
    print("\n".join(missing), end="\n" if missing else "", file=sys.stderr)
    return 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
