"""One run, from the composed configuration to the record: profile, plan, check, predict, launch, train, record.

The parent of a run owns its configuration, plan, status, tracker and progress, and never imports torch; its ranks
train. Whatever happens, record.json says how the run ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from harness import devices, display, failure, files, launch, preparation, timeline
from harness.display import Progress
from harness.earlier import Earlier
from harness.failure import Failure
from harness.launch import Outcome
from harness.manifest import manifest
from harness.preparation import Prepared, RanksFailed
from harness.problem import CannotRun, Problem
from harness.record import RunRecord
from harness.serial import finite
from harness.stage_table import stage_table
from harness.tail import Tail
from harness.trace import Trace
from harness.trackers import Tracker

CONFIG, RECORD, METRICS, RESULT = "config.yaml", "record.json", "metrics.jsonl", "result.json"
TRACE, TIMELINE = "trace.json.gz", "timeline.png"
OWN = (CONFIG, RECORD, METRICS, RESULT, TRACE, TIMELINE, launch.LOG, failure.FILE, preparation.PLAN,
       preparation.PROFILE)  # fmt: skip
"""The files of a run; a run that is started again in the same folder begins without them."""
NO_SIMULATOR = "mode=simulate: the simulator is not built in yet -> mode=plan predicts step time and memory"


def run(config: DictConfig, overrides: Sequence[str]) -> RunRecord:
    """Do what `config` says and tell the user about it; returns the record that was written.

    Every end becomes the record's status, except that of a run without a folder: raises `CannotRun`.
    """
    return _Run(config, overrides).go()


class _Run:
    def __init__(self, config: DictConfig, overrides: Sequence[str]) -> None:
        preparation.follow_profile(config, overrides)
        self.config, self.overrides = config, list(overrides)
        container: Any = OmegaConf.to_container(config, resolve=True)
        source: Any = "measured" if config.mode == "run" else "simulated"
        self.record = RunRecord(_new_id(overrides), "running", source, config=finite(container))
        self.folder = _make_folder(config.out, self.record.id)
        self.earlier = Earlier(self.folder, OWN, RECORD)
        self.tracker: Tracker | None = None

    def go(self) -> RunRecord:
        """Run to whatever end, and leave record, tracker and terminal in order."""
        with launch.preemptible() as signals:
            outcome = self.outcome()
            signals.ignored = True
            told = self.close(outcome)
        if self.record.status != "ok":
            self.explain(told)
        elif self.config.mode == "run":
            display.show(self.record, self.folder)
        return self.record

    def outcome(self) -> Outcome:
        """Do the work; how it ended."""
        try:
            self.begin()
            return self.work()
        except KeyboardInterrupt as error:
            return Outcome("preempted", str(error) or "ended by SIGINT")
        except CannotRun as error:
            return Outcome("infeasible", str(error), error.problems)
        except RanksFailed as error:
            return error.outcome
        except Exception as error:
            return self.own_failure(error)

    def begin(self) -> None:
        """An empty folder with the configuration and a record that says "running"."""
        self.earlier.put_aside()
        seeds = {"seed": self.config.seed}
        self.update(manifest=manifest(self.overrides, [], seeds, _threads(self.config)))
        files.write_text(self.folder / CONFIG, OmegaConf.to_yaml(self.config, resolve=True))

    def work(self) -> Outcome:
        if self.config.mode == "simulate":
            return Outcome("infeasible", NO_SIMULATOR)
        with Progress() as progress:
            prepared = preparation.prepare(self.config, self.overrides, self.folder, progress)
            plan = prepared.plan
            names = devices.torch_names(prepared.kind, max(plan.devices) + 1)
            used = {"devices": [names[device] for device in plan.devices]}
            self.update(plan=plan.to_json(), predicted=plan.predicted, manifest=self.record.manifest | used)
            progress.console.print(stage_table(plan, prepared.profile))
            progress.note(self.prediction(prepared))
            if self.config.mode == "run":
                self.train(prepared, progress)
            else:
                progress.note(f"plan: {self.folder / preparation.PLAN}")
        return Outcome("ok")

    def prediction(self, prepared: Prepared) -> str:
        """The prediction in one line, with where its numbers are from."""
        plan, profile = prepared.plan, prepared.profile
        step_s, samples = plan.predicted["step_time_s"], profile.micro_batch * plan.micro_batches * plan.mesh.data
        speed = display.rate(samples / step_s if step_s else None)
        return (
            f"predicted: {display.seconds(step_s)} a step of {samples} samples, {speed}; layer times {profile.source}"
        )

    def train(self, prepared: Prepared, progress: Progress) -> None:
        """Start the rank, follow it to its end, take over what it measured."""
        self.open_tracker(prepared.tracker)
        total = self.config.warmup + self.config.steps
        progress.phase("starting", "the rank loads torch and builds the model")
        tail = Tail(self.folder / METRICS)

        def follow() -> None:
            for line in tail.new():
                if line["step"] == 0:
                    progress.steps(total)
                speed = self.config.batch.size / line["step_time_s"]
                progress.step(line["step"] + 1, line["loss"], speed)
                prepared.tracker.log(line["step"], {**line, "throughput": speed})

        command = [*preparation.rank_command(self.folder), "train"]
        outcome = launch.supervise([command], self.folder, self.config.launch.timeout_s, follow)
        preparation.raise_unless_ok(outcome, self.title)
        progress.phase("recording")
        result = self.folder / RESULT
        self.update(metrics=_metrics(self.record, json.loads(result.read_text()), prepared, self.config), trace=TRACE)
        result.unlink()
        trace = Trace.load(self.folder / TRACE)
        if trace.spans:  # an engine may leave none
            timeline.draw(trace, self.folder / TIMELINE, f"{self.title}, last step")

    def open_tracker(self, tracker: Tracker) -> None:
        chosen = preparation.choices(self.config, self.overrides)
        tags = [chosen["model"], chosen["cluster"], self.record.source]
        self.tracker = tracker
        tracker.start(self.record.id, self.folder.parent.name, chosen["engine"], tags, self.record.config, self.folder)

    @property
    def title(self) -> str:
        return preparation.title(self.config, self.overrides)

    def update(self, **changes: Any) -> None:
        """Change the record, in memory and on disk; numbers that are not finite become null."""
        self.record = replace(self.record, **finite(changes))
        self.record.save(self.folder / RECORD)

    def own_failure(self, error: Exception) -> Outcome:
        """An error of this process: its traceback goes to the log, where the ranks' lie too."""
        told = Failure.of(error)
        with suppress(OSError), (self.folder / launch.LOG).open("a", encoding="utf-8") as log:
            log.write(told.traceback)
        return Outcome(told.status, told.message)

    def close(self, outcome: Outcome) -> str:
        """Write the final record, close the tracker; returns what the user must know about the files besides.

        A run that cannot run leaves an earlier good one in its folder as it was.
        """
        kept = outcome.status == "infeasible" and self.earlier.is_good()
        if not kept:
            self.earlier.drop()
        told = self.save_end(outcome)
        if self.tracker:
            self.tracker.finish(self.record.metrics, {"timeline": self.folder / TIMELINE}, self.record.status)
        if kept:
            self.earlier.put_back()
            told = f"the earlier run in {self.folder} is kept"
        return told

    def save_end(self, outcome: Outcome) -> str:
        """Write how the run ended; returns why that could not be written, if so."""
        try:
            self.update(status=outcome.status, reason=outcome.reason)
        except OSError as error:
            return self.close_without_room(Failure.of(error))
        return ""

    def close_without_room(self, failed: Failure) -> str:
        """The status is worth more than the copy of the profile, which makes room for it."""
        self.record = replace(self.record, status=failed.status, reason=failed.message)
        try:
            (self.folder / preparation.PROFILE).unlink(missing_ok=True)
            self.record.save(self.folder / RECORD)
        except OSError as error:
            return f"the record could not be written: {error.strerror}: {self.folder / RECORD}"
        return ""

    def explain(self, told: str) -> None:
        """Tell what went wrong on stderr: a table of problems as it is, anything else with where to look further."""
        console = Console(stderr=True)
        status, lines = self.record.status, [self.record.reason]
        if status != "infeasible":
            lines = [f"{self.title}: {status}: {self.record.reason}", f"the ranks' output: {self.folder / launch.LOG}"]
        for line in [*lines, told]:
            if line:
                console.print(Text(line), soft_wrap=True)


def _metrics(record: RunRecord, measured: dict[str, Any], prepared: Prepared, config: DictConfig) -> dict[str, Any]:
    """What the rank measured, and what follows from it: work per second, and predicted / measured."""
    profile, plan = prepared.profile, prepared.plan
    forward = profile.sum("flops", 0, len(profile.layers) - 1) * plan.micro_batches * plan.mesh.data
    peaks, expected = measured["peak_memory_bytes"], record.predicted["peak_memory_bytes"]
    ratios = {
        "step_time_s": record.predicted["step_time_s"] / measured["step_time_s"],
        "peak_memory_bytes": [p / m for p, m in zip(expected, peaks, strict=True)] if peaks else None,
    }
    return measured | {
        "model_flops_per_s": 3 * forward / measured["step_time_s"] or None,
        "threads": _threads(config),
        "predicted_over_measured": ratios,
    }


def _threads(config: DictConfig) -> int:
    """Intra-op threads of each CPU device: 1, unless the engine has a key for it (0 is one for each core)."""
    return config.engine.get("threads", 1) or devices.cores()


def _new_id(overrides: Sequence[str]) -> str:
    """Short, unique and in order of time: 20250131-235959-1a2b3c."""
    now = time.time_ns()
    digest = hashlib.blake2b(repr((list(overrides), now, os.getpid())).encode(), digest_size=3).hexdigest()
    return f"{datetime.fromtimestamp(now / 1e9):%Y%m%d-%H%M%S}-{digest}"


def _make_folder(out: str | None, record_id: str) -> Path:
    """`out`, or runs/<date>/<id>. Raises `CannotRun` where that cannot be a folder."""
    date = f"{record_id[:4]}-{record_id[4:6]}-{record_id[6:8]}"
    folder = Path(out) if out else Path("runs") / date / record_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(f"out {folder}", f"cannot be made a folder: {error.strerror}", "out=DIR")
        raise CannotRun([problem]) from error
    return folder.resolve()
