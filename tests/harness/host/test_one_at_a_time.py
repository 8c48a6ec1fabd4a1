"""What is done one after the other: others wait, however the first one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.host import one_at_a_time

HOLDS = """
import time
from harness.host.one_at_a_time import alone
with alone("measuring", lambda *_: None):
    print("begun", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path))
    return tmp_path


def test_one_waits_until_the_other_is_killed() -> None:
    waited = []
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "begun\n"
            with one_at_a_time.alone("counting", lambda *_: waited.append("of another kind")):
                assert not waited

            def waiting(*_: str) -> None:
                waited.append("yes")
                os.kill(holder.pid, signal.SIGKILL)

            began_s = time.monotonic()
            with one_at_a_time.alone("measuring", waiting):
                assert waited == ["yes"] and time.monotonic() - began_s < 30
        finally:
            holder.kill()


def test_it_is_free_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="measured"), one_at_a_time.alone("measuring", lambda *_: None):
        raise ValueError("measured")
    with one_at_a_time.alone("measuring", lambda *_: pytest.fail("nobody has it")):
        pass


def test_a_cache_that_cannot_be_written_is_no_reason_to_wait(cache: Path) -> None:
    (cache / "locks").write_text("a file is in the way")
    with (
        one_at_a_time.alone("measuring", lambda *_: pytest.fail("there is no lock")),
        one_at_a_time.alone("measuring", lambda *_: pytest.fail("there is no lock")),
    ):
        pass
