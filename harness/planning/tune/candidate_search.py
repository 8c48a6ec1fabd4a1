"""The search of mode=tune: what cannot fit or be fast is ruled out by bounds, then an analytic estimate, then a
simulation of the best.

    block (scheme, number of devices) -> candidates -> plan -> estimate -> simulation

A queue holds all of these by the least seconds that a step can take (`bounds`), or by the estimate once that is known.
What comes out of it first is looked at next; once a kind of scheme has a simulated step that is no longer than what is
left of it, the rest of the kind is slower, and is not looked at.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig

from harness.checks import plan_fits
from harness.config import overrides as config_overrides
from harness.core import files, units
from harness.core.plan import Mesh
from harness.core.problem import CannotRun, Problem
from harness.core.run_files import CANDIDATES, PROFILE
from harness.planning import prepare
from harness.planning.draft import Layout, memory_model
from harness.planning.prepare import Ground
from harness.planning.tune import bounds, candidates, infeasible, outcome, parallel_search, peak_memory
from harness.planning.tune.candidates import Candidate, Degrees, MicroBatches
from harness.planning.tune.judge import Judge
from harness.planning.tune.result import Best, Fastest, Line, Tuned, as_csv
from harness.planning.tune.schemes import Scheme, Settings
from harness.report.progress import Progress

LIKE_ANOTHER = "the same stages with no larger micro-batches need too much already"
FEWEST = 3
"""Candidates of each kind that are simulated, if there are so many, before an estimate rules out others."""
MARGIN = 1.1
"""An estimate rules out a candidate if it is so many times the best simulated step of its kind."""
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
class Planned:
    """A candidate that has a plan and fits, not simulated yet; with an estimate of its step time, once it was its
    turn."""

    scheme: Scheme
    line: Line


Item = Block | Chain | Planned


class Tuner(Judge):
    """One search. Its parts are in the order in which they are used; `lines` has what is known of each candidate."""

    def __init__(self, config: DictConfig, overrides: Sequence[str], folder: Path, progress: Progress) -> None:
        super().__init__(config, overrides)
        self.folder, self.progress = folder, progress
        self.title = config_overrides.title(config, overrides)
        self.micro_batches = MicroBatches(config, overrides, self.stored.micro_batch if self.stored else None)
        self.lines: dict[Candidate, Line] = {}
        self.known: dict[int, Ground] = {}
        self.best: dict[str, Fastest] = {}
        self.rows: list[Best] = []
        self.best_s: dict[str, float] = {}
        self.simulations: Counter[str] = Counter()
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
            if not self.best:
                raise
            self.interrupted = True
        finally:
            if self.lines:
                self.lines = dict(sorted(self.lines.items(), key=self.place))
                files.write_text(self.folder / CANDIDATES, as_csv([*self.lines.values()]))
        if not self.best:
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
        candidates.refuse_given(self.config, self.schemes[0].engine, self.cluster)
        counts = candidates.device_counts(self.cluster)
        self.degrees = {one.settings: candidates.degrees(one.config, one.engine.capabilities) for one in self.schemes}
        for devices, scheme in itertools.product(counts, self.schemes):
            block = Block(scheme, devices)
            if (devices == counts[0] or self.degrees[scheme.settings].free) and self.meshes(block):
                self.blocks.append(block)
            if not self.explains and devices != counts[0] and self.blocks:
                break  # it is enough to know whether the most devices are enough
        if all(line.out for block in self.blocks for line in self.listed(block)):
            raise CannotRun(infeasible.impossible(self, [*self.lines.values()]))

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
        ones = self.micro_batches.of(mesh, scheme.settings)
        return [one for one in ones if one.is_even] or ones[:1]

    def place(self, listed: tuple[Candidate, Line]) -> tuple[int, ...]:
        """Where a candidate is in tune.csv: by its scheme, the most devices first, its mesh, its micro-batches."""
        one = listed[0]
        mesh = one.mesh
        return self.numbers[one.settings], -mesh.size, mesh.pipeline, mesh.data, mesh.tensor, one.micro_batch

    def examine(self) -> None:
        """Look at all blocks. Raises KeyboardInterrupt, once what was found is known, if the user ends the search."""
        self.measure()
        blocks = [block for block in self.blocks if self.meshes(block)]
        if parallel_search.pays(self, blocks):
            parallel_search.examine(self, blocks)
        else:
            for _ in self.looks(blocks):
                self.say()

    def looks(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Go through the queue until it is empty, and yield after each look at an item."""
        for block in blocks:
            self.push(self.least_s(block), block)
        while self.queue:
            key, _, item = heapq.heappop(self.queue)
            kind = item.scheme.kind
            if self.is_slower(item, key):
                self.leave(item)
            elif self.simulations[kind] < SIMULATED:
                self.look_at(item)
                yield

    def is_slower(self, item: Item, key: float) -> bool:
        """Whether nothing of an item is faster than the best of its kind: by its bound, or by its estimate where a few
        of the kind have been simulated and the estimate is clearly longer."""
        best = self.best_s.get(item.scheme.kind, float("inf"))
        if not isinstance(item, Planned):
            return key >= best
        few = self.simulations[item.scheme.kind] < FEWEST
        return (item.line.least_step_time_s or 0.0) >= best or (not few and key >= MARGIN * best)

    def look_at(self, item: Item) -> None:
        """List the candidates of a block, plan the first of a chain, estimate or simulate a candidate."""
        if isinstance(item, Block):
            self.open(item)
        elif isinstance(item, Chain):
            self.plan(item)
        elif item.line.closed_form_step_time_s is None:
            self.estimate(item)
        else:
            self.simulate(item)

    def push(self, key: float, item: Item) -> None:
        heapq.heappush(self.queue, (key, next(self.order), item))

    def leave(self, item: Item) -> None:
        """Mark the candidates of an item as slower than the best of their kind."""
        best = self.best_s[item.scheme.kind]
        for one in item.ones if isinstance(item, Chain) else ():
            self.lines[one] = Line(one, least_step_time_s=self.bound_s(item.scheme, one), slower=True)
        if isinstance(item, Planned):
            slower = (item.line.least_step_time_s or 0.0) >= best
            self.lines[item.line.candidate] = replace(item.line, slower=slower)

    def say(self) -> None:
        """Show how far the search is."""
        self.show(len(self.lines), len(self.planned), sum(self.simulations.values()), self.best_s)

    def show(self, listed: int, planned: int, simulated: int, best_s: Mapping[str, float]) -> None:
        """Show numbers of candidates, and which of the best of each kind, in seconds, is the fastest."""
        text = f"{listed} candidates listed, {planned} planned, {simulated} simulated"
        if best_s:
            kind = min(best_s, key=best_s.__getitem__)
            text += f"; best so far: {kind} {units.rate(self.config.batch.size / best_s[kind])}"
        self.progress.detail(text)

    def measure(self, most: int | None = None, refusing: bool = True) -> None:
        """Cluster and profile of each size of micro-batches, at most of so many, up to the one with which no candidate
        can fit. Raises `CannotRun` at once where the state alone fits nowhere."""
        first = self.representatives()
        sizes = sorted(first)[:most]
        for place, size in enumerate(sizes):
            ahead = (first[larger].config(self.config) for larger in sizes[place + 1 :])
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
        known = self.micro_batches.sizes
        for block in self.blocks:
            for mesh in self.meshes(block):
                for one in self.of_mesh(block.scheme, mesh):
                    if one.is_even:
                        found.setdefault(one.micro_batch, one)
            if known is not None and found.keys() >= {*known}:
                break
        return found

    def shards(self) -> int:
        """The most devices that may share a layer."""
        return self.cluster.devices if any(one.engine.capabilities.tensor for one in self.schemes) else 1

    def ground(self, one: Candidate, ahead: Iterable[DictConfig]) -> Ground:
        """Cluster and profile for its micro-batch; those of `ahead` may be made in the same process."""
        return prepare.ground(self.config_to_profile(one), self.overrides, self.folder, self.progress, ahead)

    def holds(self, block: Block, size: int) -> bool:
        """Whether the devices of some mesh of a block have the memory for the state alone."""
        ground = self.grounds[size]
        for mesh in self.meshes(block):
            place = block.scheme.settings, mesh.pipeline, mesh.tensor
            if place in self.held_by_more:
                continue  # fewer replicas have no more room
            self.held_by_more.add(place)
            memory = memory_model(block.scheme.config, block.scheme.engine, mesh, ground.profile)
            there = memory.available_bytes(ground.cluster.device.memory_bytes)
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
        return min(self.micro_batches.batch / size * work.both_s for size, work in self.works.items()) / devices

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
        """Plan the smallest micro-batches of a chain; where they do not fit, larger ones do not."""
        one, *larger = chain.ones
        scheme, least = chain.scheme, self.bound_s(chain.scheme, one)
        if least >= self.best_s.get(scheme.kind, float("inf")):
            self.lines[one] = Line(one, least_step_time_s=least, slower=True)
        elif self.is_full(one):
            self.note_full(chain.ones)
            return
        else:
            line = self.lines[one] = self.considered(scheme, one)
            if not line.out and scheme.kind not in self.best_s:
                self.estimate(Planned(scheme, line), at_once=True)  # a first one: what cannot be faster is left out
            elif not line.out:
                self.push(max(least, self.estimate_of(one).least_s()), Planned(scheme, line))
            elif line.full:
                self.remember_full(line)
                self.note_full(larger)
                return
        self.follow(scheme, larger)

    def estimate(self, item: Planned, at_once: bool = False) -> None:
        """Estimate the step time of a candidate; simulate it `at_once`, or when its turn comes."""
        line = self.lines[item.line.candidate] = self.timed(item.line)
        timed = Planned(item.scheme, line)
        if not line.out and at_once:
            self.simulate(timed)
        elif not line.out:
            self.push(max(line.least_step_time_s or 0.0, line.closed_form_step_time_s or 0.0), timed)

    def heads(self) -> list[Candidate]:
        """The first candidate of each chain that is in the queue."""
        return [item.ones[0] for _, _, item in self.queue if isinstance(item, Chain)]

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

    def simulate(self, item: Planned) -> None:
        """Simulate a candidate; keep it if it is the best of its kind."""
        kind, one = item.scheme.kind, item.line.candidate
        best_s = self.best_s.get(kind, float("inf"))
        line, draft = self.simulation(item.line, best_s)
        self.lines[one] = line
        self.simulations[kind] += not line.out
        if draft is None:
            return
        self.rows.append(outcome.row(self, line, draft))
        seconds = float(line.simulated_step_time_s or 0.0)
        if seconds < best_s:
            layout = Layout(draft.plan, draft.profile, draft.cluster, draft.memory)
            self.best_s[kind], self.best[kind] = seconds, Fastest(line, layout, self.rows[-1])
