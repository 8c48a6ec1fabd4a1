"""Tell glibc's malloc to keep freed memory: by default it hands large blocks back to the kernel at every free.

Each large tensor then costs a page fault for every 4 KiB, again in every step. Training with large micro-batches
suffers most, so that cutting a batch into micro-batches alone looks like a gain.
"""

from __future__ import annotations

import ctypes

_ONE_ARENA = (-8, 1)  # M_ARENA_MAX: what one device's thread frees, another's can take
_NO_MMAP = (-4, 0)  # M_MMAP_MAX: no block comes straight from the kernel. M_MMAP_THRESHOLD may stop at 32 MiB
_NO_TRIM = (-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes: the largest that mallopt takes
_GROW = (-2, 64 * 2**20)  # M_TOP_PAD, bytes: the heap grows in such steps


def tune() -> bool:
    """Set malloc up in this process, best before torch is imported. False where the C library is not glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # there is no such thing on Windows
        return False
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return {library.mallopt(*option) for option in (_ONE_ARENA, _NO_MMAP, _NO_TRIM, _GROW)} == {1}


def environment() -> dict[str, str]:
    """The same for child processes, as variables that glibc reads at their start; other C libraries ignore them."""
    options = {"ARENA_MAX": _ONE_ARENA, "MMAP_MAX_": _NO_MMAP, "TRIM_THRESHOLD_": _NO_TRIM, "TOP_PAD_": _GROW}
    return {f"MALLOC_{name}": str(value) for name, (_, value) in options.items()}
