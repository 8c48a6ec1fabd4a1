"""Which precision a user means by a name that is not one: `half`, `float8`, `fp64` for a dtype, `amp` for mixed."""

from __future__ import annotations

import re
from collections.abc import Sequence

WORDS = {"half": 16, "single": 32, "float": 32, "full": 32, "double": 64}
MIXED, MIXING = "mixed", re.compile(r"mixed|amp|autocast")
BITS = re.compile(r"\d{1,4}")


def meant(typed: str, known: Sequence[str]) -> str | None:
    """Return the one of `known` with as many bits as are typed, or the next number of bits; None without bits.

    Of 16 bits it is bfloat16: every engine takes it, most of them no float16.
    """
    small = typed.lower()
    if MIXED in known and MIXING.search(small):
        return MIXED
    found = BITS.search(small)
    bits = int(found[0]) if found else WORDS.get(small)
    if bits is None:
        return None
    sizes = {name: int(size[0]) for name in known if (size := BITS.search(name))}
    return min(sizes, key=lambda name: (abs(sizes[name] - bits), not name.startswith("b")), default=None)
