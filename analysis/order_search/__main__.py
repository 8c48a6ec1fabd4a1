"""Searches the order of fifty random chains, and prints what was found next to bounds and published families."""

from __future__ import annotations

import argparse
import sys
import time

from analysis.order_search.chains import COUNT, drawn
from harness.host import command
from harness.order_search.plan_chain import families
from harness.order_search.search import Found, search

TITLES = ("chain", "stages", "micro-batches", "limit", "found", "bound", "gap", "best family", "found by", "s")


def row(seed: int) -> tuple[Found, tuple[object, ...]]:
    """Search one chain; return what was found, and its row of the table."""
    chain = drawn(seed)
    began_s = time.monotonic()
    found = search(chain, families(chain))
    took = f"{time.monotonic() - began_s:.1f}"
    best = f"{found.family} {found.family_s:g}" if found.family else "none fits"
    limited = "yes" if chain.limits else "no"
    figures = (f"{found.step_s:g}", f"{found.bound_s:g}", f"{100 * found.gap:.1f} %")
    return found, (seed, chain.stages, chain.micro_batches, limited, *figures, best, found.method, took)


def main(arguments: list[str]) -> int:
    argparse.ArgumentParser("python -m analysis.order_search", description=__doc__).parse_args(arguments)
    print("| " + " | ".join(TITLES) + " |\n|" + "---|" * len(TITLES))
    results = []
    for seed in range(COUNT):
        found, cells = row(seed)
        results.append(found)
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    fitting = [found for found in results if found.family]
    faster = sum(found.step_s < found.family_s for found in fitting)
    proven = sum(found.proven for found in results)
    print(f"\nA family fits {len(fitting)} of {COUNT} chains; the order found is faster than all of them on {faster}.")
    print(
        f"{proven} orders are proven to be the fastest; the largest gap is {100 * max(f.gap for f in results):.0f} %."
    )
    return 0


if __name__ == "__main__":
    command.begin()
    sys.exit(main(sys.argv[1:]))
