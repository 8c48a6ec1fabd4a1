"""Run one composed configuration and write its record.

    run    start     a new folder, or what an earlier start has left
           MODES     plan, simulate, run, profile, calibrate or tune: prepare, then a worker trains or measures
           finish    the final record, the tracker
           report    on the terminal

The parent of a run has its configuration, plan, status, tracker and progress, and never imports torch; a worker does.
Whatever happens, record.json says how the run ended.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from harness.checks import configuration, stored_profile
from harness.config import overrides as config_overrides
from harness.core import files, run_files
from harness.core.problem import CannotRun, Fix, Problem
from harness.core.record import RunRecord
from harness.core.run_files import CANDIDATES, CONFIG, LOG, PATTERN, PLAN, PROFILE, RESULT, SIMULATED, TIMELINE, TRACE
from harness.core.serialization import finite
from harness.core.trace import Trace
from harness.export import systems
from harness.interfaces import Planner
from harness.launch import fork_server, rank_starter, supervisor
from harness.launch.failure import Failure
from harness.launch.rank_names import RankNames
from harness.launch.signals import Signals, preemptible
from harness.launch.supervisor import Outcome, WorkerFailed
from harness.measure import calibration, torch_trace
from harness.planning import prepare, profiles, tune, work
from harness.planning.prepare import Prepared
from harness.report import alternatives_report, closing_table, pattern_plot, plan_report, timeline_plot
from harness.report.console import plain
from harness.report.plan_report import plan_tables
from harness.report.progress import Progress
from harness.run import checkpoint_files, folder_lock, metrics
from harness.run.checkpoint_files import after_steps
from harness.run.folder_lock import Lock
from harness.run.manifest import manifest
from harness.run.resume import Resumed, SamePlan, find_finished, find_resumable, refuse_to_replace, say_what_is_replaced
from harness.run.run_folder import RunFolder, has_trained, holds_run, in_use, make_folder, new_id
from harness.run.step_lines import StepLines
from harness.run.stop_request import StopRequest
from harness.schedule.step_parts import parts_s
from harness.trackers import Tracker


def run(config: DictConfig, overrides: Sequence[str], watch: Callable[[str], None] | None = None) -> RunRecord:
    """Do what `config` says and print it for the user; returns the record, which was written unless the run cannot
    start and has a folder that nobody chose: that is removed.

    `watch` is called with what the run is doing, again and again.

    Every end becomes the record's status, except that of a run without a folder, or in one that another process uses:
    raises `CannotRun`, and has touched no file.
    """
    stored_profile.follow(config, overrides)
    record_id = new_id(overrides)
    with configuration.with_request(config, overrides):
        path = make_folder(config.out, record_id, config.overwrite)
    with in_use(path, config_overrides.title(config, overrides)) as lock, fork_server.scope():
        if finished := find_finished(path, config):
            report_finished(finished, path)
            return finished
        current = Run(config, overrides, record_id, path, lock)
        with preemptible() as current.signals:
            try:
                with Progress(watch=watch) as current.progress:
                    with configuration.with_request(config, overrides):
                        current.start()
                    MODES[config.mode](current)
                outcome = Outcome("ok")
            except (KeyboardInterrupt, Exception) as error:
                outcome = current.outcome(error)
            current.signals.ignored = True
            message = current.finish(outcome)
        current.report(message)
        return current.record


def report_finished(record: RunRecord, path: Path) -> None:
    """Print the measurements of a run that is finished, and how it could train on."""
    closing_table.show(record, path)
    total = record.config["warmup"] + record.config["steps"]
    on = f"steps={2 * record.config['steps']} to train on, or " if checkpoint_files.steps(path) else ""
    advice = f"{on}overwrite=true to train it again"
    plain().print(Text(f"this run is finished {after_steps(total)}   -> {advice}"), soft_wrap=True)


class Run:
    """State that the phases of one run share."""

    progress: Progress
    signals: Signals

    def __init__(self, config: DictConfig, overrides: Sequence[str], record_id: str, path: Path, lock: Lock) -> None:
        self.config, self.overrides, self.lock = config, list(overrides), lock
        container: Any = OmegaConf.to_container(config, resolve=True)
        source: Any = "measured" if config.mode == "run" else "simulated"
        self.folder = RunFolder(path, RunRecord(record_id, "running", source, config=finite(container)))
        self.resumed: Resumed | None = None
        self.tracker: Tracker | None = None
        self.lines: StepLines | None = None

    @property
    def record(self) -> RunRecord:
        return self.folder.record

    @property
    def title(self) -> str:
        calibrates = self.config.mode == "calibrate"
        return calibration.TITLE if calibrates else config_overrides.title(self.config, self.overrides)

    def start(self) -> None:
        """Start in the folder, new or from where an earlier start ended, with a record that says "running"."""
        mode, path = self.config.mode, self.folder.path
        self.folder.start()
        found = manifest(self.overrides, [], {"seed": self.config.seed}, work.threads(self.config))
        self.folder.update(manifest=found)
        if mode != "run" and not self.config.overwrite and has_trained(path):  # its steps are not soon there again
            message = f"holds a run that has trained, mode={mode} would overwrite it"
            fixes: tuple[Fix, ...] = ({"out": f"{self.config.out}-{mode}"}, {"overwrite": True})
            raise CannotRun([Problem("out", self.config.out, message, fixes)], self.title)
        self.resumed = find_resumable(path, self.config, self.note, self.title)
        if self.resumed:
            self.folder.resume(self.resumed)
            self.folder.update(manifest=found | {"resumed": self.resumed.steps})
        else:
            refuse_to_replace(path, self.config, self.note, self.title)
            say_what_is_replaced(path, self.config, self.note)
        files.write_text(self.folder.work / CONFIG, OmegaConf.to_yaml(self._with_end_checkpoint(), resolve=True))

    def note(self, text: str) -> None:
        self.progress.note(f"note: {text}")

    def _with_end_checkpoint(self) -> DictConfig:
        """The configuration as ranks read it: a point of a sweep, whose lock is the sweep's, never gets more steps."""
        config = self.config.copy()
        if config.launch.end_checkpoint is None:
            config.launch.end_checkpoint = config.out is not None and self.lock.taken
        return config

    def prepare(self) -> Prepared:
        """Profile, plan, check and simulate; the plan is printed and recorded, and the run accepted."""
        folder, before = self.folder, self.resumed.plan if self.resumed else None

        def planning_by(planner: Planner) -> Planner:
            return SamePlan(before, planner) if before else planner

        prepared = prepare.prepare(self.config, self.overrides, folder.work, self.progress, planning_by)
        folder.accept()
        draft = prepared.draft
        used = self.record.manifest | {
            "devices": prepared.device_names(self.config.cluster.name == "local"),
            "simulation": metrics.basis(draft, self.config, prepared.values) | {"profile": prepared.profile},
        }
        folder.update(plan=draft.plan.to_json(), predicted=draft.plan.predicted, manifest=used)
        if prepared.alternatives:
            self.progress.console.print(alternatives_report.table(prepared.alternatives))
            alternatives_report.draw(prepared.alternatives, folder.path / alternatives_report.PICTURE)
            self.progress.note(f"picture {folder.path / alternatives_report.PICTURE}; the plan of the first one:")
        self.progress.console.print(plan_tables(draft.plan, draft.profile, self.config.planner.name))
        if draft.plan.mesh.data > 1:
            self.progress.note(plan_report.replicas(draft))
        return prepared

    def train_model(self) -> None:
        """mode=run: train as planned in a worker, follow it to its end, and record what it measured."""
        prepared, path = self.prepare(), self.folder.path
        self.progress.note(plan_report.prediction(prepared.draft, prepared.profile))
        self.start_tracker(prepared.tracker)
        prepared.draft.simulation.trace.save(path / SIMULATED)
        step = self.resumed.step if self.resumed else 0
        resuming = f", and training resumes {after_steps(step)}" if step else ""
        self.progress.phase("starting", f"{plan_report.starting(prepared.ranks)}{resuming}")
        launch, lines = self.config.launch, StepLines(self.config, path, self.progress, prepared.tracker, step)
        self.lines = lines
        ranks = rank_starter.step(self.config, prepared.draft.plan.mesh, prepared.draft.cluster)
        with StopRequest(path, self.signals, launch.grace_s, self.progress.note) as request:

            def follow() -> None:
                lines.forward()
                request.check()

            try:
                supervisor.run_worker(
                    path,
                    self.title,
                    launch.timeout_s,
                    *("train", str(step)),
                    follow=follow,
                    step=ranks,
                    # the ranks have the lock, too: if this process is killed the folder is in use until they have ended
                    inherits=folder_lock.handed_on(self.lock),
                    names=RankNames(prepared.draft.plan.mesh, prepared.multi_process),
                    steps_s=lines.seconds,
                )
            finally:
                checkpoint_files.tidy(path, ())  # a rank may have been ended while it wrote one
        if not (path / RESULT).exists():
            raise request.stopped(lines.done)
        self.record_training(prepared)

    def record_training(self, prepared: Prepared) -> None:
        """Record what the worker measured, next to what was predicted."""
        self.progress.phase("recording")
        path, draft = self.folder.path, prepared.draft
        result = json.loads((path / RESULT).read_text())
        done, facts = result.pop("measured_steps"), result.pop("facts")
        if done != self.config.steps:  # of a race, which ends when it is decided
            self.folder.update(config=self.record.config | {"steps": done})
        traces = {"last step, measured": Trace.load(path / TRACE), "simulated": draft.simulation.trace}
        measured, predicted = traces.values()
        found = metrics.measured(result, draft, self.config, prepared.kind) | metrics.traced(measured, draft)
        expected = self.record.predicted | {"parts_s": parts_s(predicted, draft.schedule)}
        self.folder.update(metrics=found, predicted=expected, manifest=self.record.manifest | facts, trace=TRACE)
        panels = [(f"{self.title}, {what}", trace) for what, trace in traces.items() if trace.spans]
        self.draw(panels, prepared)  # an engine may leave no trace of its own

    def simulate_step(self) -> None:
        """mode=simulate: one step in the simulator, recorded as a real run is."""
        prepared = self.prepare()
        if config_overrides.given(self.overrides, "tracker"):
            self.start_tracker(prepared.tracker)
        self.progress.phase("simulating", f"jitter {self.config.jitter:g}" if self.config.jitter else "")
        simulation = prepared.draft.disturbed(self.config.jitter, self.config.seed)
        self.folder.update(metrics=metrics.simulated(simulation, prepared.draft, self.config), trace=TRACE)
        simulation.trace.save(self.folder.path / TRACE)
        self.draw([(f"{self.title}, simulated", simulation.trace)], prepared)

    def show_plan(self) -> None:
        """mode=plan: the prediction, a warning where the layer times need one, where the plan is, how to draw it."""
        prepared = self.prepare()
        done = work.simulated(self.config, prepared.draft, prepared.draft.plan.predicted["step_time_s"])
        self.progress.note(plan_report.prediction(prepared.draft, prepared.profile, done))
        if note := self.record.manifest["simulation"]["note"]:
            self.progress.note(f"note: {note}")
        self.progress.note(f"plan: {self.folder.path / PLAN}")
        if prepared.exported:
            self.progress.note(systems.write(prepared.exported))
        if "tasks_s" in self.record.predicted:
            self.progress.note(f"picture: python -m harness.report.pattern_plot {self.folder.path}")

    def profile_model(self) -> None:
        """mode=profile: leave the model's profile, and print a summary."""
        ground = prepare.ground(self.config, self.overrides, self.folder.work, self.progress)
        profile = ground.profile
        if self.config.trace:
            profile = torch_trace.timed(profile, Path(self.config.trace))
        profile.save(self.folder.work / PROFILE)
        self.folder.accept()
        source = "measured" if profile.times == "measured" else "simulated"
        self.folder.update(source=source, manifest=self.record.manifest | {"layer_times": profile.source})
        self.progress.note(f"{profiles.described(profile)}; {ground.origin}")
        self.progress.note(f"profile: {self.folder.path / PROFILE}")

    def calibrate_links(self) -> None:
        """mode=calibrate: leave the machine's links as a cluster file, and print them."""
        cluster = calibration.ready(self.config)
        self.folder.accept()
        found = calibration.calibrate(self.config, cluster.devices, self.folder.path, self.progress)
        used = self.record.manifest | {"devices": found.devices}
        self.folder.update(source="measured", metrics=found.metrics(), manifest=used)
        calibration.report(found, self.folder.path, self.progress)

    def tune_mesh(self) -> None:
        """mode=tune: leave the fastest mesh that fits, and print it next to its rivals."""
        found = tune.tune(self.config, self.overrides, self.folder.work, self.progress)
        self.signals.ignored = True  # what is known is recorded
        self.folder.accept()
        basis = metrics.basis(found.layout, self.config, found.ground.values) | {"profile": found.ground.origin}
        plan, used = found.layout.plan, self.record.manifest | {"simulation": basis}
        self.folder.update(plan=plan.to_json(), predicted=plan.predicted, metrics=found.metrics(), manifest=used)
        tune.report(found, self.config, self.folder.path, self.progress)
        if found.interrupted:
            raise KeyboardInterrupt("the search has ended before all was searched, and what it had found is recorded")

    def draw(self, panels: list[tuple[str, Trace]], prepared: Prepared) -> None:
        """The timelines, one below the other, and a plan's pattern; without a picture the run is as good."""
        try:
            timeline_plot.draw_panels(panels, self.folder.path / TIMELINE)
            if "tasks_s" in self.record.predicted:
                pattern_plot.draw_plan(prepared.draft.plan, self.folder.path / PATTERN, self.title)
        except ValueError as error:
            self.progress.note(f"no picture: {error}")

    def start_tracker(self, tracker: Tracker) -> None:
        chosen, path = config_overrides.choices(self.config, self.overrides), self.folder.path
        tags = [chosen["model"], chosen["cluster"], self.record.source]
        self.tracker = tracker
        tracker.start(self.record.id, path.parent.name, chosen["engine"], tags, self.record.config, path)

    def outcome(self, error: BaseException) -> Outcome:
        """Return the outcome of a run that raised `error`."""
        if isinstance(error, KeyboardInterrupt):
            return Outcome("preempted", str(error) or "ended by SIGINT")
        if isinstance(error, CannotRun):
            return Outcome("infeasible", str(error), error.problems)
        if isinstance(error, WorkerFailed):
            if self.signals.asked:  # Slurm sends a signal to all processes of a job, and ends those of srun
                return Outcome("preempted", f"ended by {self.signals.asked}: {error.outcome.reason}")
            return error.outcome
        failure = Failure.of(error)  # of this process: its traceback goes to the log, where the ranks' are, too
        with suppress(OSError), (self.folder.work / LOG).open("a", encoding="utf-8") as log:
            log.write(failure.traceback)
        return Outcome(failure.status, failure.message)

    def finish(self, outcome: Outcome) -> str:
        """Write the final record, close the tracker; returns what the user must know about the files."""
        unsaved = self.lines.unsaved() if self.lines else ""
        reason = "; ".join(filter(None, [outcome.reason, unsaved]))
        message = self.folder.finish(outcome.status, reason, outcome.problems)
        path = self.folder.path
        if self.folder.accepted:
            (path / RESULT).unlink(missing_ok=True)  # also of ranks that had trained when one was ended
        if self.tracker:
            self.tracker.finish(self.record.metrics, {"timeline": path / TIMELINE}, self.record.status)
        elif self.config.out is None and not (holds_run(path) or (path / CANDIDATES).exists()):  # of what was refused
            shutil.rmtree(path, ignore_errors=True)
        return message

    def report(self, message: str) -> None:
        """Print the measurements, or on stderr what went wrong: a table of problems, or the reason and the log."""
        status, path = self.record.status, self.folder.path
        if status == "ok":
            if self.config.mode in ("run", "simulate"):
                closing_table.show(self.record, path)
            if self.record.reason:
                plain().print(Text(f"note: {self.record.reason}"), soft_wrap=True)
            return
        lines = [self.record.reason]
        if status != "infeasible":
            lines = [f"{self.title}: {status}: {self.record.reason}"]
            log = path / (LOG if self.folder.accepted else run_files.REFUSED_LOG)
            lines += [f"the ranks' output: {log}"] if log.exists() else []
            if steps := checkpoint_files.steps(path):
                lines.append(f"start it again with out={path} to resume {after_steps(steps[0])}")
            elif status == "preempted":
                lines.append("start it again: it begins from the start, with what had been measured")
        console = plain(stderr=True)
        for line in [*lines, message]:
            if line:
                console.print(Text(line), soft_wrap=True)


MODES: dict[str, Callable[[Run], None]] = {
    "run": Run.train_model,
    "plan": Run.show_plan,
    "simulate": Run.simulate_step,
    "profile": Run.profile_model,
    "calibrate": Run.calibrate_links,
    "tune": Run.tune_mesh,
}
