"""Machine code that numba has kept in its folder, read without what numba loads to compile."""

from __future__ import annotations

from typing import Any

from numba.core.runtime import rtsys


def read_alone(function: Any) -> None:
    """Lets numba read a function's machine code before it loads all that it can compile, which takes as long as reading
    ten such functions; it does where the code is not there. Changes nothing where a version of numba has other
    names."""
    cache: Any = getattr(function, "_cache", None)
    read, guarded = (getattr(cache, name, None) for name in ("_load_overload", "_guard_against_spurious_io_errors"))
    if read is None or guarded is None:
        return

    def load(signature: object, context: Any) -> Any:
        rtsys.initialize(context)
        with guarded():
            return read(signature, context)

    cache.load_overload = load
