"""Whether the claims of a paper hold, of which each has a function, or tests that settle it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from analysis.beside import Lacking
from analysis.points import Need, Points
from analysis.published import claims
from analysis.report import MISSING, Section

Results = TypeVar("Results", bound=Points[Any])
SAYS = ("holds", "does not hold", "not run", "by tests")


@dataclass(frozen=True)
class Found:
    """Whether a claim holds, and its figures in a few words, by where they are from; empty where there are none.

    What is planned, predicted or accounted counts as simulated.
    """

    holds: bool
    published: str = ""
    simulated: str = ""
    measured: str = ""


@dataclass(frozen=True)
class Check(Generic[Results]):
    """How a claim is judged, once all points that it needs are there. `judge` may raise Lacking."""

    judge: Callable[[Results], Found]
    needs: tuple[Need[Any], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What `Found` says of a claim; `says` is one of `SAYS`.

    `reason` is what may keep the claim from holding, what was not run, or the tests that settle it.
    """

    id: str
    claim: str
    says: str
    published: str = ""
    simulated: str = ""
    measured: str = ""
    reason: str = ""


def judged(
    paper: str,
    results: Results,
    checks: Mapping[str, Check[Results]],
    settled: Mapping[str, Sequence[str]],
    reasons: Mapping[str, str],
) -> list[Verdict]:
    """A verdict for each claim of paper_claims/PAPER.csv.

    `settled` names the tests that settle a claim, or a part of it (all of those that have no check); `reasons` say
    what may keep one from holding.
    """
    told = []
    for claim in claims(paper):
        tests = f"exact in {' and '.join(settled[claim.id])}" if claim.id in settled else ""
        if claim.id not in checks:
            told.append(Verdict(claim.id, claim.claim, "by tests", reason=tests))
            continue
        found = _found(checks[claim.id], results)
        if isinstance(found, str):
            told.append(Verdict(claim.id, claim.claim, "not run", reason="; ".join(filter(None, (found, tests)))))
            continue
        why = "" if found.holds else reasons.get(claim.id, "")
        says, reason = "holds" if found.holds else "does not hold", "; ".join(filter(None, (why, tests)))
        figures = (found.published, found.simulated, found.measured)
        told.append(Verdict(claim.id, claim.claim, says, *figures, reason))
    return told


def _found(check: Check[Results], results: Results) -> Found | str:
    """What is found, or why nothing is."""
    try:
        return results.lacking(check.needs) or check.judge(results)
    except Lacking as error:
        return str(error)


def section(verdicts: Sequence[Verdict], title: str = "Claims") -> Section:
    """The verdicts as a table, the reasons below it."""
    rows = tuple(
        (one.id, one.says, one.claim, *(figure or MISSING for figure in (one.published, one.simulated, one.measured)))
        for one in verdicts
    )
    told: dict[str, list[str]] = {}
    for one in verdicts:
        if one.reason:
            told.setdefault(one.reason, []).append(one.id)
    notes = (f"{', '.join(ids)}: {reason}" for reason, ids in told.items())
    columns = ("claim", "verdict", "what the paper says", "paper", "simulated", "measured")
    return Section(title, columns, rows, (summed(verdicts), *notes), texts=len(columns))


def summed(verdicts: Sequence[Verdict]) -> str:
    """15 claims: 7 holds, 5 does not hold, ..."""
    counts = Counter(one.says for one in verdicts)
    return f"{len(verdicts)} claims: " + ", ".join(f"{counts[says]} {says}" for says in SAYS if counts[says])
