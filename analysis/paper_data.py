"""Numbers that papers print in paper_tables/ and their claims in paper_claims/, where the columns are explained."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator
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
    """A paper's statement (`claim`, at `where`), and the condition on our figures under which it holds (`check`)."""

    id: str
    where: str
    claim: str
    check: str


@functools.cache
def numbers(file: str) -> tuple[Number, ...]:
    """The numbers of paper_tables/FILE.csv."""
    return tuple(_read(file))


def _read(file: str) -> Iterator[Number]:
    with (TABLES / f"{file}.csv").open(encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            yield Number(
                row["scheme"],
                _whole(row["devices"]),
                _whole(row["micro_batches"]),
                row["metric"],
                row["relation"],
                row["value"],
                row["unit"],
                row["source"],
                row["model"],
                row["case"],
                row["table"],
            )


def texts(file: str, metric: str, **where: int | str) -> list[str]:
    """All values of this metric, as they are printed; those whose `scheme`, `devices`, `case` ... are as given."""
    return [number.value for number in _numbers(file, metric, **where)]


def _numbers(file: str, metric: str, **where: int | str) -> Iterator[Number]:
    for number in numbers(file):
        if number.metric == metric and all(getattr(number, name) == wanted for name, wanted in where.items()):
            yield number


def value(file: str, metric: str, **where: int | str) -> float | None:
    """The first of `texts` as a number; None if there is none."""
    return next(map(float, texts(file, metric, **where)), None)


def printed(file: str, metric: str, **where: int | str) -> float:
    """`value` of what is known to be printed. Raises KeyError if it is not."""
    number = value(file, metric, **where)
    if number is None:
        raise KeyError(f"paper_tables/{file}.csv   has no {metric} with {where}")
    return number


def counted(file: str, metric: str, **where: int | str) -> float | None:
    """`value` of a count in ones: a paper prints 81.5 with the unit M, or 2.21 with B."""
    unit = {"M": 1e6, "B": 1e9}
    found = _numbers(file, metric, **where)
    return next((float(one.value) * unit.get(one.unit, 1) for one in found), None)


def claims(paper: str) -> list[Claim]:
    """The claims of paper_claims/PAPER.csv."""
    with (CLAIMS / f"{paper}.csv").open(encoding="utf-8", newline="") as opened:
        return [Claim(**row) for row in csv.DictReader(opened)]


def _whole(text: str) -> int | None:
    return int(text) if text else None
