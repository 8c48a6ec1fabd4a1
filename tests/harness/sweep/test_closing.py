"""What a sweep prints below its table."""

from __future__ import annotations

from harness.sweep import closing
from tests.harness.report.test_run_notes import ran


def test_an_engine_whose_devices_wait_for_each_other_is_named_once() -> None:
    records = [ran("gpipe"), ran("gpipe"), ran("ddp"), ran("torchgpipe", slowed=2.0), ran("periodic", status="oom")]
    (text,) = closing._sharing_a_lock(records)
    assert text.startswith("note: gpipe: computing took 3.0 times as long as predicted") and "engine=pipeline" in text
