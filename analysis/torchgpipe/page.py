"""`python -m analysis.torchgpipe [SOURCE...]`: the paper's tables next to ours, and its claims.

The records are those of the sweeps torchgpipe_table1 to torchgpipe_table4 and of the benchmarks of its public
documentation, at both scales: as they are committed, and in runs/.
"""

from __future__ import annotations

from analysis import paper_cli
from analysis.torchgpipe import tables
from analysis.torchgpipe.cells import cells
from analysis.torchgpipe.claim_checks import verdicts
from analysis.torchgpipe.plots import FIGURES
from analysis.torchgpipe.sweep_results import FOLDERS, Results
from harness.config import registry

PAGE = paper_cli.Page(
    module="analysis.torchgpipe",
    about=__doc__ or "",
    path=registry.ROOT / "analysis" / "results" / "torchgpipe.md",
    title="torchgpipe: paper, simulated, measured",
    intro="Made by `python -m analysis.torchgpipe --write` from the records of sweeps/torchgpipe_*.",
    sweeps=FOLDERS,
    results=Results,
    sections=tables.sections,
    verdicts=verdicts,
    missing=Results.missing,
    figures=FIGURES,
    cells=cells,
)
