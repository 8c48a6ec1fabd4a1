"""The files of a run's folder, by name.

the parent writes            config.yaml  record.json  plan.json  log  simulated.json.gz  timeline.png  pattern.png
the worker writes            metrics.jsonl  checkpoints/  trace.json.gz  error.json
the worker for the parent    profile.json  machine.json  engine_costs.json  timings.json  result.json
between them while it runs   stop (the parent asks)  rendezvous.json (where ranks of srun find rank 0)
                             hang/ (what each process does while there is no progress)
whoever uses the folder      .lock  (harness.run.folder_lock)
a start that is refused      refused.json  refused.log  (harness.run.run_folder)
"""

from __future__ import annotations

CONFIG, RECORD, PLAN, LOG = "config.yaml", "record.json", "plan.json", "log"
SIMULATED, TIMELINE, PATTERN = "simulated.json.gz", "timeline.png", "pattern.png"
METRICS, CHECKPOINTS, TRACE, ERROR = "metrics.jsonl", "checkpoints", "trace.json.gz", "error.json"
PROFILE, MACHINE, TIMINGS, RESULT = "profile.json", "machine.json", "timings.json", "result.json"
ENGINE_COSTS = "engine_costs.json"
STOP, RENDEZVOUS, HANG = "stop", "rendezvous.json", "hang"
PROFILER = "profiler"
"""The folder with torch.profiler's traces of the steps of `launch.profiler`."""
FLIGHT_RECORDER = "flight_recorder"
"""The folder with the last collectives of each rank of a run that hung, as torch's flight recorder writes them."""
LOCK, REFUSED, REFUSED_LOG = ".lock", "refused.json", "refused.log"
TABLE, POINTS = "points.csv", "points.jsonl"
"""In the folder of a sweep: its table, and the points that are submitted to Slurm."""
CONSOLE = "console"
"""In the folder of a point of a local sweep, or of an entry of a race: what its command has printed."""
RACE, RACE_PICTURE = "race.json", "race.png"
"""In the folder of a race."""
LOCK_VARIABLE = "REGATTA_LOCK"
"""The environment variable that says to a process which of its descriptors is the lock of its run's folder."""
CALIBRATION, CALIBRATION_PLOT, CANDIDATES = "calibration.json", "calibration.png", "tune.csv"
"""Files of mode=calibrate and mode=tune. The cluster file of a calibration is the user's: a later run leaves it."""

OF_END = (RESULT, TRACE, SIMULATED, TIMELINE, ERROR, PATTERN, FLIGHT_RECORDER)
"""Files about how a run ended: one that resumes starts without them."""
ALL = (
    *(CONFIG, RECORD, PLAN, LOG, METRICS, CHECKPOINTS, PROFILE, MACHINE, STOP, RENDEZVOUS, HANG),
    *(PROFILER, TIMINGS, ENGINE_COSTS, CALIBRATION, CALIBRATION_PLOT, CANDIDATES, *OF_END),
)
"""All of them: a new run in the folder of an earlier one removes them. Other files in the folder are the user's."""
FOLDERS = (CHECKPOINTS, HANG, PROFILER, FLIGHT_RECORDER)
"""Those that are folders."""
SPARE = (PROFILE, SIMULATED, TIMELINE)
"""Copies and pictures: they make room for the record where the disk is full."""
