"""All files of a run: what one that goes on, or begins anew, in the same folder begins without."""

from __future__ import annotations

from harness import (
    calibration,
    checkpoint_files,
    children,
    failure,
    launch,
    pattern_picture,
    preparation,
    profiles,
    stopping,
    tune,
)
from harness.run_files import CONFIG, METRICS, RECORD, RESULT, SIMULATED, TIMELINE, TRACE

OF_END = (RESULT, TRACE, SIMULATED, TIMELINE, failure.FILE, pattern_picture.PICTURE)
"""Of how a run ended: one that goes on begins without them."""
OWN = (CONFIG, RECORD, METRICS, *OF_END, launch.LOG, stopping.STOP, children.MACHINE, preparation.PLAN,
       profiles.PROFILE, checkpoint_files.FOLDER, *calibration.OWN, *tune.OWN)  # fmt: skip
"""All of them; a run that begins anew in the same folder begins without them."""
SPARE = (profiles.PROFILE, SIMULATED, TIMELINE)
"""Copies and pictures, which make room for the record where a disk is full."""
