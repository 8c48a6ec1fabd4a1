"""What is known of one candidate: what rules it out, an analytic estimate, a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from harness.checks import engine_support, plan_fits, profile_match, request, stored_profile
from harness.config import cluster_config, registry
from harness.config import overrides as config_overrides
from harness.config.plain_config import plain
from harness.core.memory_model import MemoryModel
from harness.core.plan import Plan
from harness.core.problem import CannotRun, NoPlan, Problem, ProblemError
from harness.core.units import sizes
from harness.interfaces import Engine
from harness.planning import contents
from harness.planning.draft import Draft, Layout, laid_out, memory_model, of_engine
from harness.planning.prepare import Ground
from harness.planning.tune import bounds, extrapolate, schemes
from harness.planning.tune.candidates import Candidate
from harness.planning.tune.result import Line
from harness.planning.tune.schemes import Scheme, Settings
from harness.planning.tune.step_time import Estimate, Known
from harness.simulator.routes import unplaced


class Judge:
    """Judges candidates one by one. `grounds` and `works` have what is known of each size of micro-batches, `planned`
    those that have a plan, `layouts` the plans that fit by their estimates."""

    def __init__(self, config: DictConfig, overrides: Sequence[str]) -> None:
        self.config, self.overrides = config, overrides
        self.schemes = schemes.of(config, overrides)
        self.by_settings: dict[Settings, Scheme] = {one.settings: one for one in self.schemes}
        self.planners = {one.settings: str(one.config.planner.name) for one in self.schemes}
        self.numbers = {settings: number for number, settings in enumerate(self.by_settings)}
        self.stored = stored_profile.stored(config.profile) if config.profile else None
        self.cluster = cluster_config.build(cluster_config.from_group(config.cluster))
        self.working: dict[Settings, DictConfig] = {}
        self.profiled: DictConfig | None = None
        self.grounds: dict[int, Ground] = {}
        self.works: dict[int, bounds.Work] = {}
        self.planned: set[Candidate] = set()
        self.layouts: dict[Candidate, Layout] = {}
        self.unsplit: dict[tuple[str, int, int], tuple[Problem, ...]] = {}
        """Planner, tensor size and micro-batch of a model that cannot be split so, whatever else the plan has."""
        self.known_schedules = Known()
        self.last_timed: tuple[Engine, Layout, float] | None = None
        self.last_simulated: tuple[Engine, Layout, Draft] | None = None
        """Of the plan that was last estimated, and simulated: schemes that differ in `planner.by` often have equal
        plans, which come one after the other."""
        self.on_any_mesh: dict[Settings, tuple[Problem, ...]] = {}
        """What rules out all candidates of a scheme, and is all that rules out one of them."""

    def scheme_of(self, one: Candidate) -> Scheme:
        """The scheme of a candidate."""
        return self.by_settings[one.settings]

    def config_of(self, one: Candidate) -> DictConfig:
        """The configuration of a run of a candidate, to be read: until the next one of its scheme is asked for, for
        copies take long."""
        own = self.working.get(one.settings)
        if own is None:
            own = self.working[one.settings] = plain(one.config(self.by_settings[one.settings].config))
        one.set_in(own)
        return own

    def config_to_profile(self, one: Candidate) -> DictConfig:
        """The configuration that is profiled for the micro-batches of a candidate: until the next one is asked for."""
        if self.profiled is None:
            self.profiled = one.config(self.config)
        one.set_in(self.profiled)
        return self.profiled

    def memory(self, scheme: Scheme, one: Candidate) -> MemoryModel:
        """The memory model of a candidate."""
        return memory_model(scheme.config, scheme.engine, one.mesh, self.grounds[one.micro_batch].profile)

    def against(self, one: Candidate) -> tuple[Problem, ...]:
        """Return the problems that rule a candidate out whatever the model's layers cost.

        Where a scheme is out on any mesh, further candidates are not asked what is wrong with their meshes.
        """
        if one.settings in self.on_any_mesh:
            return self.on_any_mesh[one.settings]
        scheme, uneven = self.by_settings[one.settings], one.uneven()
        own, planner = self.config_of(one), self.planners[one.settings]
        found = engine_support.early(own, scheme.engine, self.cluster)
        if one.mesh.tensor > 1 and not registry.splits_matmuls(planner):
            found.append(engine_support.no_split(one.mesh.tensor, own.engine.name))
        if uneven:  # then its micro-batches are rounded
            return tuple(problem for problem in found if not problem.key.startswith("batch.")) or tuple(uneven)
        if self.stored:
            found += profile_match.stored(own, self.stored, config_overrides.given(self.overrides, "model"))
        if found and found == request.on_any_mesh(own, scheme.engine.capabilities):
            self.on_any_mesh[one.settings] = tuple(found)
        return tuple(found)

    def against_layers(self, one: Candidate, ground: Ground) -> list[Problem]:
        """Return the problems that rule a candidate out once the model's layers are known."""
        scheme, given = self.by_settings[one.settings], config_overrides.given(self.overrides, "model")
        return profile_match.against_profile(
            self.config_of(one), scheme.engine.capabilities, ground.profile, ground.cluster.devices, given
        )

    def with_layers(self, line: Line) -> Line:
        """Add the problems that the model's layers cause for a candidate that was ruled out before they were known."""
        known = {problem.key for problem in line.problems}
        found = self.against_layers(line.candidate, next(iter(self.grounds.values())))
        return replace(line, problems=(*line.problems, *(problem for problem in found if problem.key not in known)))

    def bound_s(self, scheme: Scheme, one: Candidate) -> float:
        """The least seconds of a candidate's step."""
        return self.works[one.micro_batch].seconds(one.mesh, one.micro_batches, scheme.recompute)

    def with_state(self, line: Line) -> Line:
        """Add what bounds say: the least seconds of a step, and of memory the state, with activations that all
        schedules keep; if it exceeds a device's, no plan has to be made."""
        one, ground = line.candidate, self.grounds[line.candidate.micro_batch]
        scheme = self.by_settings[one.settings]
        memory = memory_model(scheme.config, scheme.engine, one.mesh, ground.profile)
        keeps = scheme.recomputation in ("never", "except_last") and not scheme.engine.may_recompute
        profile = ground.profile
        if keeps and one.mesh.pipeline == 1:  # else it takes a plan to know what the engine changes
            profile = scheme.engine.layers(Plan.contiguous([len(profile.layers)], one.micro_batches), profile)
        state, least = bounds.least_bytes(memory, profile, one.mesh, keeps)
        there = memory.available_bytes(ground.cluster.device.memory_bytes)
        needed, available = sizes(least, there)
        what = "weights, gradients and optimizer alone" if state > there else "the state and one micro-batch"
        message = f"{what} need {needed}, a device has {available}"
        found = (plan_fits.too_little_memory(message, least, there),) if least > there else ()
        return replace(
            line,
            problems=found,
            closed_form_memory_bytes=least,
            memory_limit_bytes=there,
            least_step_time_s=self.bound_s(scheme, one),
        )

    def considered(self, scheme: Scheme, one: Candidate) -> Line:
        """The line of a candidate: what rules it out, or the estimate of its memory."""
        if problems := self.against(one):
            return Line(one, problems)
        return self.judged(Line(one))

    def judged(self, line: Line) -> Line:
        """Plan a candidate, and add the analytic estimate of its memory. Or the reason why it has no plan, or does not
        fit."""
        one, line = line.candidate, self.with_state(line)
        if line.out:
            return line
        if placed := unplaced(one.mesh.data, one.mesh.pipeline * one.mesh.tensor, self.cluster):
            return replace(line, problems=tuple(placed))
        split = self.planners[one.settings], one.mesh.tensor, one.micro_batch
        if split in self.unsplit:
            return replace(line, problems=self.unsplit[split], no_plan=True)
        try:
            layout = self.layout(one)
            self.planned.add(one)
            estimate = self.estimate_of(one, layout)
            found = tuple(plan_fits.check_memory(layout.plan, estimate.peaks, layout.cluster, layout.memory))
        except CannotRun as error:
            return replace(line, problems=error.problems)
        except NoPlan as error:
            if error.unsolved.key == "mesh.tensor":
                self.unsplit[split] = (error.unsolved,)
            return replace(line, problems=(error.unsolved,), no_plan=True)
        except ProblemError as error:
            return replace(line, problems=tuple(of_engine(self.config.engine.name, one) for one in error.problems))
        if not found:
            self.layouts[one] = layout
        return replace(line, problems=found, closed_form_memory_bytes=max(estimate.peaks))

    def estimate_of(self, one: Candidate, layout: Layout | None = None) -> Estimate:
        """The analytic estimate of a candidate that fits, or of one with this plan."""
        return Estimate(self.by_settings[one.settings].engine, layout or self.layouts[one], self.known_schedules)

    def unsolved(self, one: Candidate) -> Problem | None:
        """The problem of a candidate that has no plan, with all its fixes; None if it has one."""
        try:
            self.layout(one)
        except NoPlan as error:
            return error.problem
        return None

    def timed(self, line: Line) -> Line:
        """Add the analytic estimate of the step time to a candidate that was judged and fits. Or the reason why it has
        no schedule, or none that is valid."""
        scheme, layout = self.scheme_of(line.candidate), self.layouts[line.candidate]
        if not (self.last_timed and is_same(self.last_timed, scheme.engine, layout)):
            try:
                estimate = self.estimate_of(line.candidate)
                estimate.validate(scheme.config.engine.name)
                self.last_timed = scheme.engine, layout, estimate.seconds()
            except CannotRun as error:
                return replace(line, problems=error.problems)
        return replace(line, closed_form_step_time_s=self.last_timed[-1])

    def layout(self, one: Candidate, compares: bool = False) -> Layout:
        """Plan a candidate; if it `compares`, next to baselines. Raises `CannotRun` and `NoPlan` where a run would."""
        scheme, ground = self.by_settings[one.settings], self.grounds[one.micro_batch]
        if found := self.against_layers(one, ground):
            raise CannotRun(found)
        return laid_out(self.config_of(one), scheme.engine, scheme.planner, ground.profile, ground.cluster, compares)

    def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
        """The line, once judged, with what the simulator finds; a draft if it fits. One that is faster than `best_s` is
        validated with all of its micro-batches."""
        scheme = self.by_settings[line.candidate.settings]
        try:
            timed = line.closed_form_step_time_s is not None
            draft = self.simulated(line, timed)
            if timed and draft.plan.predicted["step_time_s"] < best_s:
                extrapolate.refuse_invalid(scheme.config.engine.name, draft)
        except CannotRun as error:
            return replace(line, problems=error.problems), None
        found = draft.plan.predicted
        peaks, seconds = found["peak_memory_bytes"], found["step_time_s"]
        full = tuple(plan_fits.check_memory(draft.plan, peaks, draft.cluster, draft.memory))
        line = replace(line, problems=full, simulated_memory_bytes=max(peaks), simulated_step_time_s=seconds)
        return line, None if full else draft

    def simulated(self, line: Line, timed: bool) -> Draft:
        """Simulate a candidate that fits and, if it is `timed`, was validated. Raises `CannotRun`."""
        engine, layout = self.scheme_of(line.candidate).engine, self.layouts[line.candidate]
        if timed and self.last_simulated and is_same(self.last_simulated, engine, layout):
            known = self.last_simulated[-1]
            figures = {name: known.plan.predicted[name] for name in known.simulation.figures}
            return replace(known, plan=replace(layout.plan, predicted={**layout.plan.predicted, **figures}))
        found = extrapolate.simulated(self.config_of(line.candidate), engine, layout, validated=timed)
        self.last_simulated = engine, layout, found
        return found

    def compared(self, one: Candidate, layout: Layout) -> Layout:
        """The plan of a candidate, next to the baselines that its planner knows."""
        if not layout.plan.strategy:
            return layout
        planned = self.layout(one, compares=True).plan
        return replace(layout, plan=replace(layout.plan, predicted={**planned.predicted, **layout.plan.predicted}))

    def held(self, line: Line) -> dict[str, int]:
        """What fills the fullest device of a candidate that has a plan, at its peak; nothing without a schedule."""
        scheme = self.by_settings[line.candidate.settings]
        try:
            layout = self.layouts.get(line.candidate) or self.layout(line.candidate)
            draft = extrapolate.simulated(self.config_of(line.candidate), scheme.engine, layout)
        except CannotRun:
            return {}
        return contents.fullest(draft.simulation.peaks)


def is_same(known: tuple[Engine, Layout, Any], engine: Engine, layout: Layout) -> bool:
    """Whether an engine has the schedule of a plan that is `known`, at the same prices: all is equal but what planners
    say of their plans."""
    before, now = (replace(one, plan=replace(one.plan, predicted={})) for one in (known[1], layout))
    return known[0] is engine and before == now
