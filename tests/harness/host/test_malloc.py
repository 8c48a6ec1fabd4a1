"""The effect on page faults, in processes of their own: malloc's settings are for good."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from harness.host import malloc

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

# Ten times: 96 MiB from malloc, written, and freed. Prints the page faults.
FAULTS = """
import ctypes, resource
{setup}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size = 96 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(setup: str = "", **variables: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    program = [sys.executable, "-c", FAULTS.format(setup=setup)]
    result = subprocess.run(
        program, env=clean | variables, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return int(result.stdout)


def test_freed_memory_stays_in_the_process():
    untouched = faults()
    tuned = faults("from harness.host import malloc; assert malloc.tune() is True")
    children = faults(**malloc.environment())
    assert tuned < untouched / 5
    assert children < untouched / 5


# Two threads take and free blocks of 1 MB at once. Prints how many arenas there are.
ARENAS = """
import ctypes, os, sys, threading
from harness.host import malloc
{setup}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
both = threading.Barrier(2)
def work():
    for _ in range(1000):
        both.wait()
        libc.free(libc.malloc(1 << 20))
threads = [threading.Thread(target=work) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
sys.stdout.flush()
libc.malloc_stats()
"""


@pytest.mark.parametrize(("block_bytes", "arenas"), [(1 << 20, 3), (64 << 20, 1)])
def test_threads_have_arenas_of_their_own_where_blocks_are_small(block_bytes, arenas):
    program = [sys.executable, "-c", ARENAS.format(setup=f"malloc.tune(); malloc.tune({block_bytes})")]
    environment = os.environ | malloc.environment()
    result = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr.count("Arena") == arenas


def test_tuning_twice_is_allowed():
    assert faults("from harness.host import malloc; assert malloc.tune() and malloc.tune()") > 0


def test_environment_is_text_for_glibc():
    variables = malloc.environment()
    assert variables["MALLOC_ARENA_MAX"] == "1"
    assert variables["MALLOC_MMAP_MAX_"] == "0"
    assert all(name.startswith("MALLOC_") and value.isdigit() for name, value in variables.items())


@pytest.mark.usefixtures("commands")
def test_importing_it_does_not_import_torch():
    faults("import sys; from harness.host import malloc; assert 'torch' not in sys.modules")
