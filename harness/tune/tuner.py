"""The search: closed form for all candidates, a simulation for the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from harness import (
    check,
    clusters,
    display,
    engine_check,
    files,
    planning,
    preparation,
    profile_check,
    profiles,
    registry,
    request,
)
from harness.cluster import Cluster
from harness.interfaces import Engine, Planner
from harness.planning import Draft, Layout
from harness.preparation import Ground
from harness.problem import CannotRun, NoPlan, Problem
from harness.progress import Progress
from harness.tune import lack, room, steady
from harness.tune.candidates import Candidate, candidates
from harness.tune.estimate import estimate
from harness.tune.line import FULL, LINES, Line, as_csv
from harness.tune.result import Tuned

SIMULATED = 10
"""Candidates that are simulated: the best by closed form of those that fit."""


class Tuner:
    def __init__(self, config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.title = request.title(config, overrides)
        self.engine: Engine = registry.build("engine", config.engine)
        self.planner: Planner = registry.build("planner", config.planner)
        self.stored = profiles.stored(config.profile).micro_batch if config.profile else None
        self.lines: dict[Candidate, Line] = {}
        self.grounds: dict[int, Ground] = {}
        self.layouts: dict[Candidate, Layout] = {}
        self.best: tuple[Line, Draft] | None = None

    def go(self) -> Tuned:
        """The best of all candidates. Raises `CannotRun` where there is none."""
        try:
            self.gather()
            self.judge()
            for line in self.simulated():
                self.lines[line.candidate] = line
        finally:
            if self.lines:
                files.write_text(self.folder / LINES, as_csv([*self.lines.values()]))
        if not self.best:
            raise CannotRun(lack.problems(self.config, [*self.lines.values()], self.fits), self.title)
        line, draft = self.best
        ground = self.grounds[line.candidate.micro_batch]
        ground.profile.save(self.folder / profiles.PROFILE)
        command = line.candidate.command(self.config, self.overrides, self.engine.capabilities)
        notes = self.engine.notes(draft.plan, ground.profile, draft.cluster, draft.memory)
        return Tuned(tuple(self.lines.values()), line, draft, ground, command, tuple(notes))

    def gather(self) -> None:
        """All candidates, with what rules some out whatever the model is. Raises `CannotRun` if that is all of them."""
        cluster = clusters.build(clusters.of(self.config.cluster))
        first: list[Problem] = []
        for one in candidates(self.config, self.overrides, self.engine.capabilities, cluster.devices, self.stored):
            out = one.indivisible()
            found = [] if out else engine_check.early(one.config(self.config), self.engine, cluster)
            self.lines[one] = Line(one, out or _told(found))
            first = first or found
        if all(line.out for line in self.lines.values()):
            raise CannotRun(first or lack.indivisible([*self.lines.values()]), self.title)

    def judge(self) -> None:
        """All candidates in closed form, smaller micro-batches first: where none fits, no larger one does."""
        self.progress.phase("ranking", f"{len(self.lines)} candidates in closed form")
        full = 0
        for size in dict.fromkeys(one.micro_batch for one, line in self.lines.items() if not line.out):
            own = [line for line in self.lines.values() if line.candidate.micro_batch == size and not line.out]
            if full:
                what = f"{FULL}micro-batches of {full} need too much already"
                judged = [replace(line, out=what) for line in own]
            else:
                self.grounds[size] = self.ground(own[0].candidate)
                judged = [self.judged(line) for line in own]
                full = size if any(line.full for line in judged) and all(line.out for line in judged) else 0
            self.lines |= {line.candidate: line for line in judged}

    def ground(self, one: Candidate) -> Ground:
        """Cluster and profile for its micro-batch."""
        return preparation.ground(one.config(self.config), self.overrides, self.folder, self.progress)

    def judged(self, line: Line) -> Line:
        """With what it needs and takes in closed form, or why there is no plan."""
        line = self.with_state(line)
        if line.out:
            return line
        try:
            layout = self.layouts[line.candidate] = self.layout(line.candidate)
            seconds, peaks = estimate(self.engine, layout)
        except CannotRun as error:
            return replace(line, out=_told(error.problems))
        except NoPlan as error:
            return replace(line, out=f"{error.key} {error.what}")
        except ValueError as error:
            return replace(line, out=str(error))
        out = _full(check.of_memory(layout.plan, peaks, layout.cluster, layout.memory))
        return replace(line, out=out, closed_form_memory_bytes=max(peaks), closed_form_step_time_s=seconds)

    def with_state(self, line: Line) -> Line:
        """With what the state of training needs alone; where that is too much, no plan has to be made."""
        one, ground = line.candidate, self.grounds[line.candidate.micro_batch]
        memory = planning.memory_model(self.config, self.engine, one.mesh, ground.profile)
        least = room.share(memory, ground.profile, one.mesh)
        there = ground.cluster.device.memory_bytes - memory.reserve_bytes
        needs = "{} of {}".format(*display.sizes(least, there))
        out = f"{FULL}weights, gradients and optimizer alone need {needs}" if least > there else ""
        return replace(line, out=out, closed_form_memory_bytes=least, memory_limit_bytes=there)

    def layout(self, one: Candidate) -> Layout:
        """Its plan. Raises `CannotRun` and `NoPlan` where a run of it would end so."""
        config, ground = one.config(self.config), self.grounds[one.micro_batch]
        given = request.given(self.overrides, "model")
        found = profile_check.against_profile(config, self.engine.capabilities, ground.profile, given)
        if found:
            raise CannotRun(found)
        return planning.laid_out(config, self.engine, self.planner, ground.profile, ground.cluster)

    def simulated(self) -> Iterator[Line]:
        """The best by closed form, simulated until enough fit."""
        left = [line for line in self.lines.values() if not line.out]
        left.sort(key=lambda line: line.closed_form_step_time_s or 0.0)
        fitting = 0
        for line in left:
            if fitting == SIMULATED:
                return
            self.progress.phase("simulating", f"{fitting + 1} of {min(SIMULATED, len(left))}")
            done, draft = self.simulation(line)
            fitting += not done.out
            if draft and (not self.best or _seconds(done) < _seconds(self.best[0])):
                self.best = (done, draft)
            yield done

    def simulation(self, line: Line) -> tuple[Line, Draft | None]:
        """The line, once judged, with what the simulator finds; a draft if it fits."""
        try:
            layout = self.layouts[line.candidate]
            draft = steady.simulated(line.candidate.config(self.config), self.engine, layout)
        except CannotRun as error:
            return replace(line, out=_told(error.problems)), None
        found = draft.plan.predicted
        peaks = found["peak_memory_bytes"]
        out = _full(check.of_memory(draft.plan, peaks, draft.cluster, draft.memory))
        line = replace(line, out=out, simulated_memory_bytes=max(peaks), simulated_step_time_s=found["step_time_s"])
        return line, None if out else draft

    def fits(self, config: DictConfig, cluster: Cluster) -> bool:
        """Whether any candidate of the smallest micro-batch fits with another configuration on another cluster."""
        other = Tuner(config, self.overrides, self.folder, self.progress)
        size = min(self.grounds)
        other.grounds = {size: replace(self.grounds[size], cluster=cluster)}
        for one in candidates(config, self.overrides, other.engine.capabilities, cluster.devices, self.stored):
            if one.micro_batch != size or one.indivisible():
                continue
            if engine_check.early(one.config(config), other.engine, cluster):
                continue
            line = other.judged(Line(one))
            if not line.out and not other.simulation(line)[0].out:
                return True
        return False


def _seconds(line: Line) -> float:
    assert line.simulated_step_time_s is not None
    return line.simulated_step_time_s


def _told(problems: Sequence[Problem]) -> str:
    """The first of them, in a line."""
    return f"{problems[0].key} {problems[0].what}" if problems else ""


def _full(problems: Sequence[Problem]) -> str:
    return f"{FULL}{_told(problems)}" if problems else ""
