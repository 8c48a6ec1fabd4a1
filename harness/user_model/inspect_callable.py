"""`python -m harness.user_model.inspect_callable REFERENCE FILE`: write the signature of a user's callable to FILE.

A process of its own imports the user's file, so that its parent does not load torch, and nothing of the user's runs
there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.problem import CannotRun
from harness.user_model import loaded_signature, reference
from harness.user_model.parameters import Signature


def main(text: str, answer: Path) -> None:
    """Write the signature, or the problems that keep it from being read."""
    try:
        found = loaded_signature.of(reference.parse(text))
    except CannotRun as error:
        found = Signature(problems=error.problems)
    found.save(answer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m harness.user_model.inspect_callable", description=__doc__)
    parser.add_argument("reference", metavar="REFERENCE", help="FILE.py:NAME")
    parser.add_argument("file", metavar="FILE", type=Path, help="where the signature is written")
    asked = parser.parse_args()
    main(asked.reference, asked.file)
