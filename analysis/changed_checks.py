"""Checks of claims that have changed: what the paper says, the check and verdict before, and those of today.

Each was changed before the records that it judges now were made. `paper_claims/changed.csv` has the checks that were.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence

from analysis.claim_check import Verdict
from analysis.paper_data import CLAIMS, claims
from analysis.report import Section

TITLE = "Changed checks"
COLUMNS = ("claim", "the paper says", "check before", "verdict before", "figures before", "check now", "verdict now")
NOTE = "Sentences in the sense of the paper, some shortened. Figures before are of the records of that time."


def sections(paper: str, verdicts: Sequence[Verdict]) -> list[Section]:
    """A row for each claim with another check than before, of those that have a verdict; no table without rows."""
    says = {one.id: one.says for one in verdicts if one.says != "not run"}
    now = {claim.id: claim.check for claim in claims(paper)}
    with (CLAIMS / "changed.csv").open(encoding="utf-8", newline="") as opened:
        known = [row for row in csv.DictReader(opened) if row["id"] in now and row["id"] in says]
    rows = tuple(
        (
            row["id"],
            row["paper_says"],
            row["earlier_check"],
            row["earlier_verdict"],
            row["earlier_figures"],
            now[row["id"]],
            says[row["id"]],
        )
        for row in known
    )
    return [Section(TITLE, COLUMNS, rows, (NOTE,), texts=len(COLUMNS))] if rows else []
