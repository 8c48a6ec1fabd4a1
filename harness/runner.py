"""One run, from the composed configuration to the record: profile, plan, check, simulate, launch, train, record.

The parent of a run owns its configuration, plan, status, tracker and progress, and never imports torch; its ranks
train. Whatever happens, record.json says how the run ended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from harness import (
    calibration,
    checkpoint_files,
    children,
    display,
    figures,
    files,
    launch,
    pattern_picture,
    plan_words,
    preparation,
    profiles,
    request,
    run_folder,
    srun,
    timeline,
    tune,
)
from harness.children import ChildFailed
from harness.earlier import Earlier
from harness.failure import Failure
from harness.interfaces import Planner
from harness.launch import Outcome
from harness.manifest import manifest
from harness.own_files import OF_END, OWN
from harness.plan_tables import plan_tables
from harness.preparation import Prepared
from harness.problem import CannotRun, Problem
from harness.progress import Progress
from harness.record import RunRecord
from harness.record_file import RecordFile
from harness.resuming import Resumed, SamePlan, Unfinished
from harness.run_files import CONFIG, METRICS, RECORD, RESULT, SIMULATED, TIMELINE, TRACE
from harness.serial import finite
from harness.stopping import Stopping
from harness.tail import Tail
from harness.trace import Trace
from harness.trackers import Tracker


def run(config: DictConfig, overrides: Sequence[str]) -> RunRecord:
    """Do what `config` says and tell the user about it; returns the record that was written.

    Every end becomes the record's status, except that of a run without a folder: raises `CannotRun`.
    """
    return _Run(config, overrides).go()


class _Run:
    def __init__(self, config: DictConfig, overrides: Sequence[str]) -> None:
        profiles.follow(config, overrides)
        self.config, self.overrides = config, list(overrides)
        container: Any = OmegaConf.to_container(config, resolve=True)
        source: Any = "measured" if config.mode == "run" else "simulated"
        record = RunRecord(run_folder.new_id(overrides), "running", source, config=finite(container))
        self.folder = run_folder.make(config.out, record.id)
        self.file = RecordFile(self.folder, record)
        self.earlier = Earlier(self.folder, OWN, RECORD)
        self.resumed: Resumed | None = None
        self.notes: list[str] = []
        self.tracker: Tracker | None = None

    @property
    def record(self) -> RunRecord:
        return self.file.record

    def go(self) -> RunRecord:
        """Run to whatever end, and leave record, tracker and terminal in order."""
        with launch.preemptible() as self.signals:
            outcome = self.outcome()
            self.signals.ignored = True
            told = self.close(outcome)
        if self.record.status != "ok":
            self.explain(told)
        elif self.config.mode in ("run", "simulate"):
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
        except ChildFailed as error:
            if self.signals.asked:  # Slurm sends a signal to all processes of a job, and ends those of srun
                return Outcome("preempted", f"ended by {self.signals.asked}: {error.outcome.reason}")
            return error.outcome
        except Exception as error:
            return self.own_failure(error)

    def begin(self) -> None:
        """A folder with the configuration, a record that says "running", and what an unfinished run has left."""
        unfinished = Unfinished(self.folder, CONFIG, preparation.PLAN, RECORD, METRICS)
        self.resumed = unfinished.resumed(self.config, self.notes.append)
        if self.resumed:
            for name in OF_END:
                (self.folder / name).unlink(missing_ok=True)
            self.file.record = replace(self.record, id=self.resumed.record.id)
        else:
            self.earlier.put_aside()
            checkpoint_files.forget(self.folder)
        found = manifest(self.overrides, [], {"seed": self.config.seed}, figures.threads(self.config))
        self.file.update(manifest=found | ({"resumed": self.resumed.steps} if self.resumed else {}))
        files.write_text(self.folder / CONFIG, OmegaConf.to_yaml(self.config, resolve=True))
        mode = self.config.mode
        if mode != "run" and self.earlier.has_trained():
            what = f"holds a run that has trained, which mode={mode} would take the place of"
            raise CannotRun([Problem(f"out {self.config.out}", what, f"out={self.config.out}-{mode}")], self.title)

    def work(self) -> Outcome:
        with Progress() as progress:
            for note in self.notes:
                progress.note(f"note: {note}")
            own = {"profile": self.profile, "calibrate": self.calibrate, "tune": self.tune}
            if way := own.get(self.config.mode):
                way(progress)
                return Outcome("ok")
            prepared = preparation.prepare(self.config, self.overrides, self.folder, progress, self.plan_before)
            draft = prepared.draft
            used = self.record.manifest | {
                "devices": prepared.device_names(self.config.cluster.name == "local"),
                "simulation": figures.basis(draft, self.config, prepared.values) | {"profile": prepared.profile},
            }
            self.file.update(plan=draft.plan.to_json(), predicted=draft.plan.predicted, manifest=used)
            progress.console.print(plan_tables(draft.plan, draft.profile, self.config.planner.name))
            if draft.plan.mesh.data > 1:
                progress.note(plan_words.replicas(draft))
            if self.config.mode == "simulate":
                self.simulate(prepared, progress)
                return Outcome("ok")
            progress.note(plan_words.prediction(draft, prepared.profile))
            if self.config.mode == "run":
                self.train(prepared, progress)
            else:
                self.tell_plan(progress)
        return Outcome("ok")

    def plan_before(self, planner: Planner) -> Planner:
        """The run's planner, or for one that goes on its plan."""
        return SamePlan(self.resumed.plan, planner) if self.resumed and self.resumed.plan else planner

    def tell_plan(self, progress: Progress) -> None:
        """What mode=plan ends with: a warning where the layer times need one, where the plan lies, how to draw it."""
        if note := self.record.manifest["simulation"]["note"]:
            progress.note(f"note: {note}")
        progress.note(f"plan: {self.folder / preparation.PLAN}")
        if "tasks_s" in self.record.predicted:
            progress.note(f"picture: python -m harness.pattern_picture {self.folder}")

    def profile(self, progress: Progress) -> None:
        """Leave the model's profile, and say what it holds."""
        ground = preparation.ground(self.config, self.overrides, self.folder, progress)
        found = ground.profile
        source = "measured" if found.source.startswith("measured") else "simulated"
        self.file.update(source=source, manifest=self.record.manifest | {"layer_times": found.source})
        progress.note(f"{profiles.described(found)}; {ground.origin}")
        progress.note(f"profile: {self.folder / profiles.PROFILE}")

    def calibrate(self, progress: Progress) -> None:
        """Leave the machine's links as a cluster file, and tell them."""
        found = calibration.calibrate(self.config, self.folder, progress)
        used = self.record.manifest | {"devices": found.devices}
        self.file.update(source="measured", metrics=found.metrics(), manifest=used)
        calibration.tell(found, self.folder, progress)

    def tune(self, progress: Progress) -> None:
        """Leave the fastest mesh that fits, and tell it beside its rivals."""
        found = tune.tune(self.config, self.overrides, self.folder, progress)
        basis = figures.basis(found.draft, self.config, found.ground.values) | {"profile": found.ground.origin}
        self.file.update(plan=found.draft.plan.to_json(), predicted=found.draft.plan.predicted, metrics=found.metrics(),
                    manifest=self.record.manifest | {"simulation": basis})  # fmt: skip
        tune.tell(found, self.folder, progress)

    def simulate(self, prepared: Prepared, progress: Progress) -> None:
        """One step in the simulator, recorded as a real run is."""
        tracked = request.given(self.overrides, "tracker")
        if tracked:
            self.open_tracker(prepared.tracker)
        progress.phase("simulating", f"jitter {self.config.jitter:g}" if self.config.jitter else "")
        done = prepared.draft.disturbed(self.config.jitter, self.config.seed)
        self.file.update(metrics=figures.simulated(done, prepared.draft), trace=TRACE)
        done.trace.save(self.folder / TRACE)
        self.draw([(f"{self.title}, simulated", done.trace)], prepared, progress)

    def train(self, prepared: Prepared, progress: Progress) -> None:
        """Start the rank, follow it to its end, take over what it measured."""
        self.open_tracker(prepared.tracker)
        prepared.draft.simulation.trace.save(self.folder / SIMULATED)
        total = self.config.warmup + self.config.steps
        begun = self.resumed.step if self.resumed else 0
        going_on = f", and goes on {checkpoint_files.after(begun)}" if begun else ""
        progress.phase("starting", f"{plan_words.starting(prepared.ranks)}{going_on}")
        tail, done = Tail(self.folder / METRICS), 0
        stopping = Stopping(self.folder, self.signals, self.config.launch.grace_s, progress.note)

        def follow() -> None:
            nonlocal done
            for line in tail.new():
                if line["step"] == 0:
                    progress.steps(total)
                done = line["step"] + 1
                speed = self.config.batch.size / line["step_time_s"]
                progress.step(done, line["loss"], speed)
                prepared.tracker.log(line["step"], {**line, "throughput": speed})
            stopping.look()

        step = srun.step(self.config, prepared.draft.plan.mesh, prepared.draft.cluster)
        with stopping:
            timeout_s, words = self.config.launch.timeout_s, ("train", str(begun))
            children.work(self.folder, self.title, timeout_s, *words, follow=follow, step=step)
        if not (self.folder / RESULT).exists():
            raise stopping.stopped(done)
        progress.phase("recording")
        result = self.folder / RESULT
        measured = figures.measured(json.loads(result.read_text()), prepared.draft, self.config, prepared.kind)
        self.file.update(metrics=measured, trace=TRACE)
        result.unlink()
        traces = {"last step, measured": Trace.load(self.folder / TRACE), "simulated": prepared.draft.simulation.trace}
        panels = [(f"{self.title}, {what}", trace) for what, trace in traces.items() if trace.spans]
        self.draw(panels, prepared, progress)  # an engine may leave no trace of its own

    def draw(self, panels: list[tuple[str, Trace]], prepared: Prepared, progress: Progress) -> None:
        """The timelines, one below the other, and a plan's pattern; without a picture the run is as good."""
        try:
            timeline.draw_panels(panels, self.folder / TIMELINE)
            if "tasks_s" in self.record.predicted:
                pattern_picture.draw_plan(prepared.draft.plan, self.folder / pattern_picture.PICTURE, self.title)
        except ValueError as error:
            progress.note(f"no picture: {error}")

    def open_tracker(self, tracker: Tracker) -> None:
        chosen = request.choices(self.config, self.overrides)
        tags = [chosen["model"], chosen["cluster"], self.record.source]
        self.tracker = tracker
        tracker.start(self.record.id, self.folder.parent.name, chosen["engine"], tags, self.record.config, self.folder)

    @property
    def title(self) -> str:
        calibrates = self.config.mode == "calibrate"
        return calibration.TITLE if calibrates else request.title(self.config, self.overrides)

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
        kept = outcome.status == "infeasible" and not self.resumed and self.earlier.is_good()
        if not kept:
            self.earlier.drop()
        told = self.file.end(outcome.status, outcome.reason)
        if self.tracker:
            self.tracker.finish(self.record.metrics, {"timeline": self.folder / TIMELINE}, self.record.status)
        if kept:
            self.earlier.put_back()
            told = f"the earlier run in {self.folder} is kept"
        return told

    def explain(self, told: str) -> None:
        """Tell what went wrong on stderr: a table of problems as it is, anything else with where to look further."""
        console = Console(stderr=True)
        status, lines = self.record.status, [self.record.reason]
        if status != "infeasible":
            log = self.folder / launch.LOG
            lines = [f"{self.title}: {status}: {self.record.reason}"]
            lines += [f"the ranks' output: {log}"] if log.exists() else []
            if steps := checkpoint_files.steps(self.folder):
                lines.append(f"started again with out={self.folder} it goes on {checkpoint_files.after(steps[0])}")
        for line in [*lines, told]:
            if line:
                console.print(Text(line), soft_wrap=True)
