"""The search of mode=tune: an analytic estimate of every candidate, and a simulation of the best ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from harness.checks import engine_support, plan_fits, profile_match, stored_profile
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.config import overrides as config_overrides
from harness.core import files, units
from harness.core.cluster import Cluster
from harness.core.problem import CannotRun, Fix, NoPlan, Problem, ProblemError, apply
from harness.core.run_files import CANDIDATES, PROFILE
from harness.interfaces import Engine, Planner
from harness.planning import prepare
from harness.planning.draft import Draft, Layout, laid_out, memory_model, of_engine
from harness.planning.prepare import Ground
from harness.planning.tune import extrapolate, impossible, infeasible, peak_memory
from harness.planning.tune.candidates import Candidate, candidates
from harness.planning.tune.result import Line, Tuned, as_csv
from harness.planning.tune.step_time import estimate
from harness.report.progress import Progress

SIMULATED = 10
"""Number of candidates that are simulated: the fastest by analytic estimate among those that fit."""


class Tuner:
    def __init__(self, config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.title = config_overrides.title(config, overrides)
        self.engine: Engine = registry.build("engine", config.engine)
        self.planner: Planner = registry.build("planner", config.planner)
        self.stored = stored_profile.stored(config.profile) if config.profile else None
        self.lines: dict[Candidate, Line] = {}
        self.grounds: dict[int, Ground] = {}
        self.layouts: dict[Candidate, Layout] = {}
        self.best: tuple[Line, Draft] | None = None

    def search(self) -> Tuned:
        """Search all candidates for the best one. Raises `CannotRun` if none is possible."""
        try:
            self.gather()
            self.judge()
            for line in self.simulated():
                self.lines[line.candidate] = line
        except CannotRun as error:
            raise CannotRun(self.typed(error.problems), self.title) from error
        finally:
            if self.lines:
                files.write_text(self.folder / CANDIDATES, as_csv([*self.lines.values()]))
        if not self.best:
            layered = [self.with_layers(line) for line in self.lines.values()]
            found = infeasible.problems(self.config, self.overrides, layered, self.fits)
            raise CannotRun(self.typed(found), self.title)
        line, draft = self.best
        ground = self.grounds[line.candidate.micro_batch]
        ground.profile.save(self.folder / PROFILE)
        command = line.candidate.command(self.config, self.overrides, self.engine.capabilities)
        notes = self.engine.notes(draft.plan, ground.profile, draft.cluster, draft.memory)
        lines = [*self.lines.values()]
        reasons = impossible.reasons(lines, self.helps)
        return Tuned(tuple(lines), line, draft, ground, command, tuple(notes), reasons)

    def typed(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems with the memory of the devices, if the user has typed it."""
        return plan_fits.with_value(problems, self.config, self.overrides)

    def gather(self) -> None:
        """All candidates, with what rules some out whatever the model is. Raises `CannotRun` if that is all of them."""
        cluster = cluster_config.build(cluster_config.from_group(self.config.cluster))
        self.lines = {one: Line(one, self.against(one, self.config, cluster)) for one in self.all(self.config, cluster)}
        if all(line.out for line in self.lines.values()):
            raise CannotRun(infeasible.impossible(self.overrides, [*self.lines.values()]))

    def all(self, config: DictConfig, cluster: Cluster) -> list[Candidate]:
        """Return all candidates on a cluster."""
        size = self.stored.micro_batch if self.stored else None
        return candidates(config, self.overrides, self.engine.capabilities, cluster.devices, size)

    def against(self, one: Candidate, config: DictConfig, cluster: Cluster) -> tuple[Problem, ...]:
        """Return the problems that rule a candidate out whatever the model's layers cost."""
        own, uneven = one.config(config), one.uneven()
        found = engine_support.early(own, self.engine, cluster)
        if one.mesh.tensor > 1 and not registry.splits_matmuls(config.planner.name):
            found.append(engine_support.no_split(one.mesh.tensor, config.engine.name))
        if uneven:  # then its micro-batches are rounded
            return tuple(problem for problem in found if not problem.key.startswith("batch.")) or tuple(uneven)
        if self.stored:
            found += profile_match.stored(own, self.stored, config_overrides.given(self.overrides, "model"))
        return tuple(found)

    def judge(self) -> None:
        """Estimate all candidates, smaller micro-batches first: where the smallest does not fit, no larger does."""
        self.progress.phase("ranking", f"{len(self.lines)} candidates by analytic estimate")
        full = 0
        sizes = list(dict.fromkeys(one.micro_batch for one, line in self.lines.items() if not line.out))
        for place, size in enumerate(sizes):
            own = [line for line in self.lines.values() if line.candidate.micro_batch == size and not line.out]
            if full:
                larger = plan_fits.too_little_memory(f"micro-batches of {full} need too much already")
                judged = [replace(line, problems=(larger,)) for line in own]
            else:
                self.grounds[size] = self.ground(own[0].candidate, sizes[place + 1 :])
                judged = [self.judged(line) for line in own]
                full = size if any(line.full for line in judged) and all(line.out for line in judged) else 0
            self.lines |= {line.candidate: line for line in judged}

    def ground(self, one: Candidate, larger: Sequence[int]) -> Ground:
        """Cluster and profile for its micro-batch; those of `larger` ones may be made in the same process."""
        first = {line.candidate.micro_batch: line.candidate for line in reversed(self.lines.values()) if not line.out}
        ahead = [first[size].config(self.config) for size in larger]
        return prepare.ground(one.config(self.config), self.overrides, self.folder, self.progress, ahead)

    def judged(self, line: Line) -> Line:
        """Add the analytic estimate of memory and step time to a candidate, or the reason why it has no plan."""
        line = self.with_state(line)
        if line.out:
            return line
        try:
            layout = self.layouts[line.candidate] = self.layout(line.candidate)
            seconds, peaks = estimate(self.engine, layout)
        except CannotRun as error:
            return replace(line, problems=error.problems)
        except NoPlan as error:
            return replace(line, problems=(error.unsolved,), no_plan=error)
        except ProblemError as error:
            return replace(line, problems=tuple(of_engine(self.config.engine.name, one) for one in error.problems))
        found = tuple(plan_fits.check_memory(layout.plan, peaks, layout.cluster, layout.memory))
        return replace(line, problems=found, closed_form_memory_bytes=max(peaks), closed_form_step_time_s=seconds)

    def with_state(self, line: Line) -> Line:
        """Add the memory of the training state alone; if it exceeds a device's, no plan has to be made."""
        one, ground = line.candidate, self.grounds[line.candidate.micro_batch]
        memory = memory_model(self.config, self.engine, one.mesh, ground.profile)
        least = peak_memory.share(memory, ground.profile, one.mesh)
        there = ground.cluster.device.memory_bytes - memory.reserve_bytes
        needed, available = units.sizes(least, there)
        message = f"weights, gradients and optimizer alone need {needed}, a device has {available}"
        found = (plan_fits.too_little_memory(message, least, there),) if least > there else ()
        return replace(line, problems=found, closed_form_memory_bytes=least, memory_limit_bytes=there)

    def with_layers(self, line: Line) -> Line:
        """Add the problems that the model's layers cause for a candidate that was ruled out before they were known."""
        known = {problem.key for problem in line.problems}
        found = self.against_layers(line.candidate, next(iter(self.grounds.values())))
        return replace(line, problems=(*line.problems, *(problem for problem in found if problem.key not in known)))

    def against_layers(self, one: Candidate, ground: Ground) -> list[Problem]:
        """Return the problems that rule a candidate out once the model's layers are known."""
        config, given = one.config(self.config), config_overrides.given(self.overrides, "model")
        return profile_match.against_profile(
            config, self.engine.capabilities, ground.profile, ground.cluster.devices, given
        )

    def layout(self, one: Candidate) -> Layout:
        """Plan a candidate. Raises `CannotRun` and `NoPlan` where a run of it would."""
        config, ground = one.config(self.config), self.grounds[one.micro_batch]
        if found := self.against_layers(one, ground):
            raise CannotRun(found)
        return laid_out(config, self.engine, self.planner, ground.profile, ground.cluster)

    def simulated(self) -> Iterator[Line]:
        """Simulate candidates in the order of their analytic estimates, until enough of them fit."""
        left = [line for line in self.lines.values() if not line.out]
        left.sort(key=lambda line: line.closed_form_step_time_s or 0.0)
        fitting = 0
        for number, line in enumerate(left):
            if fitting == SIMULATED:
                return
            total = min(SIMULATED + number - fitting, len(left))  # one that does not fit gives way to another
            self.progress.phase("simulating", f"{number + 1} of {total}")
            done, draft = self.simulation(line)
            fitting += not done.out
            if draft and (not self.best or _seconds(done) < _seconds(self.best[0])):
                self.best = (done, draft)
            yield done

    def simulation(self, line: Line) -> tuple[Line, Draft | None]:
        """The line, once judged, with what the simulator finds; a draft if it fits."""
        try:
            layout = self.layouts[line.candidate]
            draft = extrapolate.simulated(line.candidate.config(self.config), self.engine, layout)
        except CannotRun as error:
            return replace(line, problems=error.problems), None
        found = draft.plan.predicted
        peaks, seconds = found["peak_memory_bytes"], found["step_time_s"]
        full = tuple(plan_fits.check_memory(draft.plan, peaks, draft.cluster, draft.memory))
        line = replace(line, problems=full, simulated_memory_bytes=max(peaks), simulated_step_time_s=seconds)
        return line, None if full else draft

    def helps(self, line: Line, fix: Fix) -> bool:
        """Whether a candidate has a plan once the fix is typed; it may need too much memory."""
        typed = apply(self.overrides, fix)
        try:
            config = compose(typed)
            stored_profile.follow(config, typed)
            other = type(self)(config, typed, self.folder, self.progress)
        except CannotRun:
            return False
        other.grounds, one = self.grounds, line.candidate
        ground = self.grounds.get(one.micro_batch)
        if not ground or other.against(one, config, ground.cluster):
            return False
        judged = other.judged(Line(one))
        return judged.full or not judged.out

    def fits(self, config: DictConfig, cluster: Cluster) -> bool:
        """Whether any candidate of the smallest micro-batch fits with another configuration on another cluster."""
        other = Tuner(config, self.overrides, self.folder, self.progress)
        size = min(self.grounds)
        other.grounds = {size: replace(self.grounds[size], cluster=cluster)}
        for one in other.all(config, cluster):
            if one.micro_batch != size or other.against(one, config, cluster):
                continue
            line = other.judged(Line(one))
            if not line.out and not other.simulation(line)[0].out:
                return True
        return False


def _seconds(line: Line) -> float:
    assert line.simulated_step_time_s is not None
    return line.simulated_step_time_s
