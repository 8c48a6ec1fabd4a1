"""How the paper's planner does against the best plan of consecutive stages and against ours."""

from __future__ import annotations

from analysis.madpipe.claim_checks import SAME
from analysis.madpipe.sweep_results import ALL_OF_THEM, CONTIGUOUS, EXACT, NETWORKS, PUBLISHED, Results, Row, mean
from analysis.report import MISSING, Section

IN_ALL, LOSES = "all", "longer"


def section(results: Results) -> Section:
    """A line for each network: how many instances have ended, and in how many the paper's plan loses."""
    ran, count = results.count(ALL_OF_THEM)
    rows = tuple(_line(results, network) for network in (*NETWORKS.values(), IN_ALL))
    columns = (
        "network",
        "ended",
        "optimum proven",
        "60 s reached",
        "no plan",
        "shorter than the best contiguous",
        "equal",
        LOSES,
        "longest",
        "mean",
        "only contiguous has a plan",
        "as published / exact",
    )
    loses = rows[-1][columns.index(LOSES)]
    notes = (
        f"The paper's planner has ended in {ran} of {count} instances; in {loses} of them the best plan of "
        "consecutive stages is better.",
        "Proven is the optimum of the integer program, for the allocation that Algorithm 1 has chosen. Longest and "
        "(geometric) mean are of period / the best contiguous plan's.",
    )
    return Section(f"{PUBLISHED}, against the best contiguous plan", columns, rows, notes, texts=1)


def _line(results: Results, network: str) -> tuple[str, ...]:
    schemes = results.by_scheme("fig7")
    rows = {instance: row for instance, row in schemes.get(PUBLISHED, {}).items() if network in (IN_ALL, instance[0])}
    count = len([row for row in results.rows(ALL_OF_THEM) if network in (IN_ALL, row.network)])
    whole, exact = (_ratios(rows, schemes.get(scheme, {})) for scheme in (CONTIGUOUS, EXACT))
    alone = sum(not row.ok and _fits(schemes.get(CONTIGUOUS, {}).get(instance)) for instance, row in rows.items())
    return (
        network,
        f"{len(rows)} of {count}",
        str(sum(row.proven for row in rows.values())),
        str(sum(row.ok and not row.proven for row in rows.values())),
        str(sum(not row.ok for row in rows.values())),
        str(sum(ratio < 1 - SAME for ratio in whole)),
        str(sum(abs(ratio - 1) <= SAME for ratio in whole)),
        str(sum(ratio > 1 + SAME for ratio in whole)),
        f"{max(whole):.2f}" if whole else MISSING,
        f"{mean(whole):.3f}" if whole else MISSING,
        str(alone),
        f"{mean(exact):.3f}" if exact else MISSING,
    )


def _ratios(rows: dict[tuple[str, int, int, int], Row], others: dict[tuple[str, int, int, int], Row]) -> list[float]:
    """Of the periods of instances that both solve."""
    both = [(row, others[instance]) for instance, row in rows.items() if instance in others]
    return [row.period_s / other.period_s for row, other in both if row.ok and other.ok]


def _fits(row: Row | None) -> bool:
    return row is not None and row.ok
