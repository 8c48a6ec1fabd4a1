"""Settings of glibc's malloc that keep freed memory: by default it returns large blocks to the kernel at every free.

Each large tensor then costs a page fault for every 4 KiB, again in every step. Training with large micro-batches
suffers most, so that cutting a batch into micro-batches alone looks like a gain.

Threads that share an arena wait for each other, at every small tensor; but an arena that is not the process's first is
made of heaps of 64 MiB, and what does not fit into one always comes directly from the kernel. U-Net's stages on two CPU
devices take 1.2 times as long with blocks of 33 MB in arenas of their own as in one, 1.6 times with 75 MB; AmoebaNet's,
with blocks of 1 MB, 0.8 times.
"""

from __future__ import annotations

import ctypes

_ARENA_MAX = -8
_ONE_ARENA = (_ARENA_MAX, 1)
_ARENAS = (_ARENA_MAX, 64)
_SMALL = 16 * 2**20  # bytes: some fit a heap
_NO_MMAP = (-4, 0)  # M_MMAP_MAX: no block comes directly from the kernel. M_MMAP_THRESHOLD may stop at 32 MiB
_NO_TRIM = (-1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes: the largest that mallopt takes
_GROW = (-2, 64 * 2**20)  # M_TOP_PAD, bytes: the heap grows in such steps


def tune(block_bytes: int = _SMALL) -> bool:
    """Sets malloc up in this process, before it starts threads. Returns False where the C library is not glibc.

    Threads have arenas of their own if the largest blocks that they often allocate, `block_bytes`, are small.
    """
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # not available on Windows
        return False
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    arenas = _ARENAS if block_bytes < _SMALL else _ONE_ARENA
    return {library.mallopt(*option) for option in (arenas, _NO_MMAP, _NO_TRIM, _GROW)} == {1}


def environment() -> dict[str, str]:
    """Returns the settings for child processes, as variables that glibc reads at start; other C libraries ignore
    them."""
    options = {"ARENA_MAX": _ONE_ARENA, "MMAP_MAX_": _NO_MMAP, "TRIM_THRESHOLD_": _NO_TRIM, "TOP_PAD_": _GROW}
    return {f"MALLOC_{name}": str(value) for name, (_, value) in options.items()}
