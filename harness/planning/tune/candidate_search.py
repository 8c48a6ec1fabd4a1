"""The search of mode=tune: what cannot fit or be fast is ruled out by bounds, then an analytic estimate, then a
simulation of the best.

    block (scheme, number of devices) -> candidates -> estimate -> simulation

A queue holds all of these by the least seconds that a step can take (`bounds`), or by the estimate once that is known.
What comes out of it first is looked at next; once a kind of scheme has a simulated step that is no longer than what is
left of it, the rest of the kind is slower, and is not looked at.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from harness.checks import engine_support, plan_fits, profile_match, stored_profile
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.config import overrides as config_overrides
from harness.core import files, units
from harness.core.memory_model import MemoryModel
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Fix, NoPlan, Problem, ProblemError, apply
from harness.core.run_files import CANDIDATES, PROFILE
from harness.planning import contents, prepare
from harness.planning.draft import Draft, Layout, laid_out, memory_model, of_engine
from harness.planning.prepare import Ground
from harness.planning.tune import bounds, candidates, extrapolate, infeasible, outcome, peak_memory, schemes
from harness.planning.tune.candidates import Candidate, Degrees
from harness.planning.tune.result import Best, Line, Tuned, as_csv
from harness.planning.tune.schemes import Scheme, Settings
from harness.planning.tune.step_time import estimate
from harness.report.progress import Progress

LIKE_ANOTHER = "the same stages with no larger micro-batches need too much already"
FEWEST = 3
"""Candidates of each kind that are simulated, if there are so many, before an estimate rules out others."""
MARGIN = 1.1
"""An estimate rules out a candidate if it is so many times the best simulated step of its kind."""
TRIED = 8
"""Candidates that are simulated at most to know whether a fix helps."""
SIMULATED = 10
"""Candidates of each kind that are simulated at most: the fastest by analytic estimate among those that fit."""


@dataclass(frozen=True)
class Block:
    """All candidates of a scheme on so many devices."""

    scheme: Scheme
    devices: int


@dataclass(frozen=True)
class Chain:
    """Candidates of a scheme on a mesh that are not planned yet, smaller micro-batches first."""

    scheme: Scheme
    ones: tuple[Candidate, ...]


@dataclass(frozen=True)
class Estimated:
    """A candidate with its estimate, not simulated yet."""

    scheme: Scheme
    line: Line


Item = Block | Chain | Estimated


class Tuner:
    """One search. Its parts are in the order in which they are used; `lines` has what is known of each candidate."""

    def __init__(self, config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> None:
        self.config, self.overrides, self.folder, self.progress = config, overrides, folder, progress
        self.title = config_overrides.title(config, overrides)
        self.schemes = schemes.of(config, overrides)
        self.by_settings: dict[Settings, Scheme] = {one.settings: one for one in self.schemes}
        self.working: dict[Settings, DictConfig] = {}
        self.stored = stored_profile.stored(config.profile) if config.profile else None
        self.cluster = cluster_config.build(cluster_config.from_group(config.cluster))
        self.lines: dict[Candidate, Line] = {}
        self.grounds: dict[int, Ground] = {}
        self.known: dict[int, Ground] = {}
        self.layouts: dict[Candidate, Layout] = {}
        self.drafts: dict[str, tuple[Line, Draft]] = {}
        self.rows: list[Best] = []
        self.best_s: dict[str, float] = {}
        self.simulations: Counter[str] = Counter()
        self.works: dict[int, bounds.Work] = {}
        self.full: dict[tuple[Settings, int, int], list[tuple[int, int]]] = defaultdict(list)
        self.blocks: list[Block] = []
        self.queue: list[tuple[float, int, Item]] = []
        self.order = itertools.count()
        self.fewest = self.cluster.devices
        self.degrees: dict[Settings, Degrees] = {}
        self.all_meshes: dict[tuple[Settings, int], list[Mesh]] = {}
        self.held_by_more: set[tuple[Settings, int, int]] = set()
        self.no_larger: int | None = None
        self.most_stages = self.cluster.devices
        self.interrupted = False
        self.explains = True
        """Whether it is said what would fit, where nothing does."""

    def search(self) -> Tuned:
        """Search all candidates for the best one of each kind. Raises `CannotRun` if none is possible."""
        self.progress.phase(
            "searching", f"{self.title}: {len(self.schemes)} schemes, up to {self.cluster.devices} devices"
        )
        try:
            self.gather()
            self.examine()
        except CannotRun as error:
            raise CannotRun(self.typed(error.problems), self.title) from error
        except KeyboardInterrupt:
            if not self.drafts:
                raise
            self.interrupted = True
        finally:
            if self.lines:
                files.write_text(self.folder / CANDIDATES, as_csv([*self.lines.values()]))
        if not self.drafts:
            layered = [self.with_layers(line) for line in self.lines.values()]
            raise CannotRun(self.typed(infeasible.problems(self, layered)), self.title)
        found = outcome.of(self)
        found.ground.profile.save(self.folder / PROFILE)
        return found

    def typed(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems with the memory of the devices, if the user has typed it."""
        return plan_fits.with_value(problems, self.config, self.overrides)

    def gather(self) -> None:
        """A block for each scheme and number of devices, the most devices first. Raises `CannotRun` where no candidate
        is possible, whatever the model is."""
        candidates.refuse_given(self.config, self.schemes[0].engine.capabilities, self.cluster)
        counts = candidates.device_counts(self.cluster)
        self.degrees = {one.settings: candidates.degrees(one.config, one.engine.capabilities) for one in self.schemes}
        for devices, scheme in itertools.product(counts, self.schemes):
            block = Block(scheme, devices)
            if (devices == counts[0] or self.degrees[scheme.settings].free) and self.meshes(block):
                self.blocks.append(block)
            if not self.explains and devices != counts[0] and self.blocks:
                break  # it is enough to know whether the most devices are enough
        if all(line.out for block in self.blocks for line in self.listed(block)):
            raise CannotRun(infeasible.impossible(self.overrides, [*self.lines.values()]))

    def listed(self, block: Block) -> Iterator[Line]:
        """The candidates of a block, with what rules some out whatever the model is."""
        for mesh in self.meshes(block):
            for one in self.of_mesh(block.scheme, mesh):
                line = Line(one, self.against(one))
                if line.out:
                    self.lines[one] = line
                yield line

    def meshes(self, block: Block) -> list[Mesh]:
        """The meshes of a block that make its scheme one of its own; without those of more stages than layers, once the
        model is known, unless they are given."""
        place = block.scheme.settings, block.devices
        if place not in self.all_meshes:
            self.all_meshes[place] = self.degrees[block.scheme.settings].meshes(block.devices)
        found = self.all_meshes[place]
        most = self.config.mesh.pipeline or self.most_stages
        return [mesh for mesh in found if mesh.pipeline <= most and block.scheme.takes(mesh)]

    def of_mesh(self, scheme: Scheme, mesh: Mesh) -> list[Candidate]:
        """The candidates of a mesh, small micro-batches first; those that do not divide the batch only if none does."""
        stored = self.stored.micro_batch if self.stored else None
        given = candidates.given_micro_batches(self.config, self.overrides)
        sizes = candidates.sizes(self.config, self.overrides, stored, mesh)
        ones = [Candidate(size, mesh, self.config.batch.size, given, scheme.settings) for size in sizes]
        return [one for one in ones if not one.uneven()] or ones[:1]

    def against(self, one: Candidate) -> tuple[Problem, ...]:
        """Return the problems that rule a candidate out whatever the model's layers cost."""
        scheme, uneven = self.by_settings[one.settings], one.uneven()
        own, planner = self.config_of(one), scheme.config.planner.name
        found = engine_support.early(own, scheme.engine, self.cluster)
        if one.mesh.tensor > 1 and not registry.splits_matmuls(planner):
            found.append(engine_support.no_split(one.mesh.tensor, own.engine.name))
        if uneven:  # then its micro-batches are rounded
            return tuple(problem for problem in found if not problem.key.startswith("batch.")) or tuple(uneven)
        if self.stored:
            found += profile_match.stored(own, self.stored, config_overrides.given(self.overrides, "model"))
        return tuple(found)

    def config_of(self, one: Candidate) -> DictConfig:
        """The configuration of a run of a candidate: until the next one of its scheme is asked for, for copies take
        long."""
        own = self.working.get(one.settings)
        if own is None:
            own = self.working[one.settings] = one.config(self.by_settings[one.settings].config)
        one.set_in(own)
        return own

    def examine(self) -> None:
        """Go through the queue until it is empty."""
        self.measure()
        for block in self.blocks:
            if self.meshes(block):
                self.push(self.least_s(block), block)
        while self.queue:
            key, _, item = heapq.heappop(self.queue)
            kind = item.scheme.kind
            if self.is_slower(item, key):
                self.leave(item)
            elif self.simulations[kind] < SIMULATED:
                self.look_at(item)
                self.say()

    def is_slower(self, item: Item, key: float) -> bool:
        """Whether nothing of an item is faster than the best of its kind: by its bound, or by its estimate where a few
        of the kind have been simulated and the estimate is clearly longer."""
        best = self.best_s.get(item.scheme.kind, float("inf"))
        if not isinstance(item, Estimated):
            return key >= best
        few = self.simulations[item.scheme.kind] < FEWEST
        return (item.line.least_step_time_s or 0.0) >= best or (not few and key >= MARGIN * best)

    def look_at(self, item: Item) -> None:
        """List the candidates of a block, plan the first of a chain, or simulate a candidate."""
        if isinstance(item, Block):
            self.open(item)
        elif isinstance(item, Chain):
            self.plan(item)
        else:
            self.simulate(item)

    def push(self, key: float, item: Item) -> None:
        heapq.heappush(self.queue, (key, next(self.order), item))

    def leave(self, item: Item) -> None:
        """Mark the candidates of an item as slower than the best of their kind."""
        best = self.best_s[item.scheme.kind]
        for one in item.ones if isinstance(item, Chain) else ():
            self.lines[one] = Line(one, least_step_time_s=self.bound_s(item.scheme, one), slower=True)
        if isinstance(item, Estimated):
            slower = (item.line.least_step_time_s or 0.0) >= best
            self.lines[item.line.candidate] = replace(item.line, slower=slower)

    def say(self) -> None:
        """Show how far the search is."""
        done = sum(self.simulations.values())
        text = f"{len(self.lines)} candidates listed, {len(self.layouts)} planned, {done} simulated"
        if self.best_s:
            kind = min(self.best_s, key=self.best_s.__getitem__)
            text += f"; best so far: {kind} {units.rate(self.config.batch.size / self.best_s[kind])}"
        self.progress.detail(text)

    def measure(self, most: int | None = None, refusing: bool = True) -> None:
        """Cluster and profile of each size of micro-batches, at most of so many, up to the one with which no candidate
        can fit. Raises `CannotRun` at once where the state alone fits nowhere."""
        first = self.representatives()
        sizes = sorted(first)[:most]
        for place, size in enumerate(sizes):
            ahead = [first[larger].config(self.config) for larger in sizes[place + 1 :]]
            self.grounds[size] = self.known.get(size) or self.ground(first[size], ahead)
            profile = self.grounds[size].profile
            self.works[size], self.most_stages = bounds.Work.of(profile), len(profile.layers)
            if refusing and place == 0 and not any(self.holds(block, size) for block in self.blocks):
                self.refuse_state()
            if (
                place + 1 < len(sizes)
                and self.works[size].most_saved > self.shards() * self.grounds[size].cluster.device.memory_bytes
            ):
                self.no_larger = size
                return

    def representatives(self) -> dict[int, Candidate]:
        """A candidate for each size of micro-batches."""
        found: dict[int, Candidate] = {}
        known = set(candidates.sizes(self.config, self.overrides, None, Mesh()))
        for block in self.blocks:
            for mesh in self.meshes(block):
                for one in self.of_mesh(block.scheme, mesh):
                    if not one.uneven():
                        found.setdefault(one.micro_batch, one)
            if found.keys() >= known and not candidates.given_micro_batches(self.config, self.overrides):
                break
        return found

    def shards(self) -> int:
        """The most devices that may share a layer."""
        return self.cluster.devices if any(one.engine.capabilities.tensor for one in self.schemes) else 1

    def ground(self, one: Candidate, ahead: Sequence[DictConfig]) -> Ground:
        """Cluster and profile for its micro-batch; those of `ahead` may be made in the same process."""
        return prepare.ground(one.config(self.config), self.overrides, self.folder, self.progress, ahead)

    def holds(self, block: Block, size: int) -> bool:
        """Whether the devices of some mesh of a block have the memory for the state alone."""
        ground = self.grounds[size]
        for mesh in self.meshes(block):
            place = block.scheme.settings, mesh.pipeline, mesh.tensor
            if place in self.held_by_more:
                continue  # fewer replicas have no more room
            self.held_by_more.add(place)
            memory = memory_model(block.scheme.config, block.scheme.engine, mesh, ground.profile)
            there = ground.cluster.device.memory_bytes - memory.reserve_bytes
            if peak_memory.share(memory, ground.profile, mesh) <= there:
                return True
        return False

    def refuse_state(self) -> NoReturn:
        """Refuse a model whose state fits on no mesh."""
        for block in self.blocks[: len(self.schemes)]:  # those of the most devices
            self.open(block)
        raise CannotRun(infeasible.problems(self, [*self.lines.values()]) if self.explains else [])

    def least_s(self, block: Block) -> float:
        """The least seconds of a step on so many devices."""
        alone = not self.degrees[block.scheme.settings].free
        devices = self.meshes(block)[0].size if alone else block.devices
        return min(self.config.batch.size / size * work.both_s for size, work in self.works.items()) / devices

    def bound_s(self, scheme: Scheme, one: Candidate) -> float:
        """The least seconds of a candidate's step."""
        return self.works[one.micro_batch].seconds(one.mesh, one.micro_batches, scheme.recompute)

    def open(self, block: Block) -> None:
        """List the candidates of a block: a chain for each mesh whose smallest micro-batches bounds do not rule out."""
        self.fewest = min(self.fewest, block.devices)
        for mesh in self.meshes(block):
            ones = self.of_mesh(block.scheme, mesh)
            first, problems = ones[0], tuple(ones[0].uneven())
            ready = tuple(one for one in ones if one.micro_batch in self.grounds)
            if problems or not ready:
                larger = plan_fits.too_little_memory(f"micro-batches of {self.no_larger} need too much already")
                self.lines[first] = Line(first, problems or (larger,))
            elif self.is_full(ready[0]):
                self.note_full(ready)
            elif (line := self.with_state(Line(ready[0]))).out:
                self.lines[ready[0]] = line
                self.remember_full(line)
            else:
                self.follow(block.scheme, ready)

    def follow(self, scheme: Scheme, ones: Sequence[Candidate]) -> None:
        """Put what is left of a chain into the queue, by the least seconds of any in it."""
        if ones:
            self.push(min(self.bound_s(scheme, one) for one in ones), Chain(scheme, tuple(ones)))

    def plan(self, chain: Chain) -> None:
        """Estimate the smallest micro-batches of a chain; where they do not fit, larger ones do not."""
        one, *larger = chain.ones
        scheme, least = chain.scheme, self.bound_s(chain.scheme, one)
        if least >= self.best_s.get(scheme.kind, float("inf")):
            self.lines[one] = Line(one, least_step_time_s=least, slower=True)
        elif self.is_full(one):
            self.note_full(chain.ones)
            return
        else:
            problems = self.against(one)
            line = self.lines[one] = Line(one, problems) if problems else self.judged(Line(one))
            if not line.out and scheme.kind not in self.best_s:
                self.simulate(Estimated(scheme, line))  # a first one that fits: what cannot be faster is left out
            elif not line.out:
                self.push(max(least, line.closed_form_step_time_s or 0.0), Estimated(scheme, line))
            elif line.full:
                self.remember_full(line)
                self.note_full(larger)
                return
        self.follow(scheme, larger)

    def remember_full(self, line: Line) -> None:
        """A candidate that has too little memory rules out others."""
        one = line.candidate
        self.full[one.settings, one.mesh.pipeline, one.mesh.tensor].append((one.mesh.data, one.micro_batch))

    def note_full(self, ones: Sequence[Candidate]) -> None:
        """Candidates that another one rules out, which has too little memory."""
        for one in ones:
            self.lines[one] = Line(one, (plan_fits.too_little_memory(LIKE_ANOTHER),))

    def is_full(self, one: Candidate) -> bool:
        """Whether a mesh with the same stages and shards has too little memory for no larger micro-batches, and no
        fewer replicas to share the state."""
        known = self.full[one.settings, one.mesh.pipeline, one.mesh.tensor]
        return any(data >= one.mesh.data and size <= one.micro_batch for data, size in known)

    def simulate(self, item: Estimated) -> None:
        """Simulate a candidate; keep it if it is the best of its kind."""
        kind, one = item.scheme.kind, item.line.candidate
        line, draft = self.simulation(item.line)
        self.lines[one] = line
        self.simulations[kind] += not line.out
        if draft is None:
            return
        self.rows.append(outcome.row(self, line, draft))
        seconds = float(line.simulated_step_time_s or 0.0)
        if seconds < self.best_s.get(kind, float("inf")):
            self.best_s[kind], self.drafts[kind] = seconds, (line, draft)

    def judged(self, line: Line) -> Line:
        """Add the analytic estimate of memory and step time to a candidate, or the reason why it has no plan."""
        scheme = self.by_settings[line.candidate.settings]
        line = self.with_state(line)
        if line.out:
            return line
        try:
            layout = self.layouts[line.candidate] = self.layout(line.candidate)
            seconds, peaks = estimate(scheme.engine, layout)
        except CannotRun as error:
            return replace(line, problems=error.problems)
        except NoPlan as error:
            return replace(line, problems=(error.unsolved,), no_plan=error)
        except ProblemError as error:
            return replace(line, problems=tuple(of_engine(self.config.engine.name, one) for one in error.problems))
        found = tuple(plan_fits.check_memory(layout.plan, peaks, layout.cluster, layout.memory))
        return replace(line, problems=found, closed_form_memory_bytes=max(peaks), closed_form_step_time_s=seconds)

    def with_state(self, line: Line) -> Line:
        """Add what bounds say: the least seconds of a step, and of memory the state, with activations that all
        schedules keep; if it exceeds a device's, no plan has to be made."""
        one, ground = line.candidate, self.grounds[line.candidate.micro_batch]
        scheme = self.by_settings[one.settings]
        memory = memory_model(scheme.config, scheme.engine, one.mesh, ground.profile)
        keeps = scheme.recomputation in ("never", "except_last")
        state, least = bounds.least_bytes(memory, ground.profile, one.mesh, keeps)
        there = ground.cluster.device.memory_bytes - memory.reserve_bytes
        needed, available = units.sizes(least, there)
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

    def with_layers(self, line: Line) -> Line:
        """Add the problems that the model's layers cause for a candidate that was ruled out before they were known."""
        known = {problem.key for problem in line.problems}
        found = self.against_layers(line.candidate, next(iter(self.grounds.values())))
        return replace(line, problems=(*line.problems, *(problem for problem in found if problem.key not in known)))

    def against_layers(self, one: Candidate, ground: Ground) -> list[Problem]:
        """Return the problems that rule a candidate out once the model's layers are known."""
        scheme, given = self.by_settings[one.settings], config_overrides.given(self.overrides, "model")
        return profile_match.against_profile(
            self.config_of(one), scheme.engine.capabilities, ground.profile, ground.cluster.devices, given
        )

    def layout(self, one: Candidate) -> Layout:
        """Plan a candidate. Raises `CannotRun` and `NoPlan` where a run of it would."""
        scheme, ground = self.by_settings[one.settings], self.grounds[one.micro_batch]
        if found := self.against_layers(one, ground):
            raise CannotRun(found)
        return laid_out(self.config_of(one), scheme.engine, scheme.planner, ground.profile, ground.cluster)

    def simulation(self, line: Line) -> tuple[Line, Draft | None]:
        """The line, once judged, with what the simulator finds; a draft if it fits."""
        scheme = self.by_settings[line.candidate.settings]
        try:
            layout = self.layouts[line.candidate]
            draft = extrapolate.simulated(self.config_of(line.candidate), scheme.engine, layout)
        except CannotRun as error:
            return replace(line, problems=error.problems), None
        found = draft.plan.predicted
        peaks, seconds = found["peak_memory_bytes"], found["step_time_s"]
        full = tuple(plan_fits.check_memory(draft.plan, peaks, draft.cluster, draft.memory))
        line = replace(line, problems=full, simulated_memory_bytes=max(peaks), simulated_step_time_s=seconds)
        return line, None if full else draft

    def helps(self, line: Line, fix: Fix) -> bool:
        """Whether a candidate has a plan once the fix is typed; it may need too much memory."""
        settings = tuple((key, value) for key, value in line.candidate.settings if key not in fix)
        other, one = self.with_fix(fix), replace(line.candidate, settings=settings)
        if other is None or settings not in other.by_settings or one.micro_batch not in self.grounds:
            return False
        other.grounds, other.works = self.grounds, self.works
        if other.against(one):
            return False
        judged = other.judged(Line(one))
        return judged.full or not judged.out

    def with_fix(self, fix: Fix) -> Tuner | None:
        """A search with a fix of the user's overrides; None if these are refused."""
        typed = apply(self.overrides, fix)
        try:
            config = compose(typed)
            stored_profile.follow(config, typed)
            return type(self)(config, typed, self.folder, self.progress)
        except CannotRun:
            return None

    def fits(self, fix: Fix) -> bool:
        """Whether anything fits once the fix is typed. Profiles that are known are not made again."""
        other = self.with_fix(fix)
        if other is None:
            return False
        for size, ground in self.grounds.items():
            own, wanted = ground.cluster, other.cluster
            device = wanted.device if plan_fits.MEMORY in fix else own.device
            cluster = replace(own, nodes=wanted.nodes, devices_per_node=wanted.devices_per_node, device=device)
            other.known[size] = replace(ground, cluster=cluster)
        other.explains = False
        try:
            return other.finds_one()
        except CannotRun:
            return False

    def finds_one(self) -> bool:
        """Whether a candidate of all devices with the smallest micro-batches fits: of those with the least memory by
        bounds, the first `TRIED` are simulated."""
        self.gather()
        self.measure(most=1)
        most_devices = self.blocks[0].devices
        for block in self.blocks:
            if block.devices == most_devices:
                self.open(block)
        heads = [self.with_state(Line(item.ones[0])) for _, _, item in self.queue if isinstance(item, Chain)]
        heads.sort(key=lambda line: line.closed_form_memory_bytes or 0)
        for line in heads[:TRIED]:
            if self.against(line.candidate):
                continue
            judged = self.judged(line)
            if not judged.out and not self.simulation(judged)[0].out:
                return True
        return False

    def held(self, line: Line) -> dict[str, int]:
        """What fills the fullest device of a candidate that has a plan, at its peak; nothing without a schedule."""
        scheme = self.by_settings[line.candidate.settings]
        try:
            layout = self.layouts[line.candidate]
            draft = extrapolate.simulated(self.config_of(line.candidate), scheme.engine, layout)
        except CannotRun:
            return {}
        return contents.fullest(draft.simulation.peaks)

    def scheme_of(self, one: Candidate) -> Scheme:
        """The scheme of a candidate."""
        return self.by_settings[one.settings]

    def memory(self, scheme: Scheme, one: Candidate) -> MemoryModel:
        """The memory model of a candidate."""
        return memory_model(scheme.config, scheme.engine, one.mesh, self.grounds[one.micro_batch].profile)
