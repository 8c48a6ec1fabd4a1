"""What papers print: their numbers in paper_tables/, their claims in paper_claims/, where the columns are explained."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).parent / "paper_tables"
CLAIMS = Path(__file__).parent / "paper_claims"


@dataclass(frozen=True)
class Number:
    """One published number: `value` as it is printed; the columns that are empty are None."""

    scheme: str
    devices: int | None
    micro_batches: int | None
    metric: str
    relation: str
    value: str
    unit: str
    source: str
    model: str
    case: str
    table: str


@dataclass(frozen=True)
class Claim:
    """What a paper says (`claim`, at `where`), and what must be true of our figures for it to hold (`check`)."""

    id: str
    where: str
    claim: str
    check: str


def numbers(file: str) -> list[Number]:
    """The numbers of paper_tables/FILE.csv."""
    with (TABLES / f"{file}.csv").open(encoding="utf-8", newline="") as opened:
        return [
            Number(row["scheme"], _whole(row["devices"]), _whole(row["micro_batches"]), row["metric"],
                   row["relation"], row["value"], row["unit"], row["source"], row["model"], row["case"],
                   row["table"])
            for row in csv.DictReader(opened)
        ]  # fmt: skip


def value(published: Sequence[Number], metric: str, scheme: str, **where: int | str) -> float | None:
    """The number of this metric in a row: of this scheme, and of the `devices`, `model`, `case` ... that are given."""
    for number in published:
        same = all(getattr(number, name) == wanted for name, wanted in where.items())
        if same and (number.metric, number.scheme) == (metric, scheme):
            return float(number.value)
    return None


def claims(paper: str) -> list[Claim]:
    """The claims of paper_claims/PAPER.csv."""
    with (CLAIMS / f"{paper}.csv").open(encoding="utf-8", newline="") as opened:
        return [Claim(**row) for row in csv.DictReader(opened)]


def _whole(text: str) -> int | None:
    return int(text) if text else None
