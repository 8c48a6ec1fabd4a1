"""Checks whether the claims of a paper hold: each claim has a function, or tests that prove it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from analysis.match_records import Need, Points
from analysis.paper_data import claims
from analysis.report import MISSING, Section
from analysis.run_artifacts import MissingData

Results = TypeVar("Results", bound=Points[Any])
SAYS = ("holds", "does not hold", "not run", "by tests")


@dataclass(frozen=True)
class Finding:
    """Whether a claim holds, and its figures in a few words by their source; empty where there are none.

    What is planned, predicted or accounted counts as simulated.
    """

    holds: bool
    published: str = ""
    simulated: str = ""
    measured: str = ""


@dataclass(frozen=True)
class Check(Generic[Results]):
    """The check of a claim once all points that it needs were run. `judge` may raise MissingData."""

    judge: Callable[[Results], Finding]
    needs: tuple[Need[Any], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The result of checking a claim; `says` is one of `SAYS`.

    `reason` is what may keep the claim from holding, what was not run, or the tests that prove it.
    """

    id: str
    claim: str
    says: str
    published: str = ""
    simulated: str = ""
    measured: str = ""
    reason: str = ""


def check_claims(
    paper: str,
    results: Results,
    checks: Mapping[str, Check[Results]],
    settled: Mapping[str, Sequence[str]],
    reasons: Mapping[str, str],
) -> list[Verdict]:
    """A verdict for each claim of paper_claims/PAPER.csv.

    `settled` names the tests that prove a claim or a part of it (every claim without a check has some); `reasons` say
    why a claim may not hold.
    """
    checked = []
    for claim in claims(paper):
        tests = f"exact in {' and '.join(settled[claim.id])}" if claim.id in settled else ""
        if claim.id not in checks:
            checked.append(Verdict(claim.id, claim.claim, "by tests", reason=tests))
            continue
        finding = _finding(checks[claim.id], results)
        if isinstance(finding, str):
            checked.append(Verdict(claim.id, claim.claim, "not run", reason=_joined(finding, tests)))
            continue
        why = "" if finding.holds else reasons.get(claim.id, "")
        figures = (finding.published, finding.simulated, finding.measured)
        says = "holds" if finding.holds else "does not hold"
        checked.append(Verdict(claim.id, claim.claim, says, *figures, _joined(why, tests)))
    return checked


def _joined(why: str, tests: str) -> str:
    return f"{why.removesuffix('.')}; {tests}" if why and tests else why or tests


def _finding(check: Check[Results], results: Results) -> Finding | str:
    """The finding, or why there is none."""
    try:
        return results.missing_points(check.needs) or check.judge(results)
    except MissingData as error:
        return str(error)


def section(verdicts: Sequence[Verdict], title: str = "Claims") -> Section:
    """The verdicts as a table, the reasons below it."""
    rows = tuple(
        (one.id, one.says, one.claim, *(figure or MISSING for figure in (one.published, one.simulated, one.measured)))
        for one in verdicts
    )
    ids_of: dict[str, list[str]] = {}
    for one in verdicts:
        if one.reason:
            ids_of.setdefault(one.reason, []).append(one.id)
    notes = (f"{', '.join(ids)}: {reason}" for reason, ids in ids_of.items())
    columns = ("claim", "verdict", "what the paper says", "paper", "simulated", "measured")
    return Section(title, columns, rows, (summed(verdicts), *notes), texts=len(columns))


def summed(verdicts: Sequence[Verdict]) -> str:
    """15 claims: 7 holds, 5 does not hold, ..."""
    counts = Counter(one.says for one in verdicts)
    return f"{len(verdicts)} claims: " + ", ".join(f"{counts[says]} {says}" for says in SAYS if counts[says])
