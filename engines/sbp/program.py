"""Translate a plan into the instruction of each device for each matmul: strategies, with a digit of the mesh for each
factor.

Digits of one kind stand in a row; those in front split rows. A matmul undoes the last of them (the part of p1 that
splits rows), or adds the next ones (the part of p2 that becomes rows), so that a residual branch comes back to the
blocks that it began with. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from engines.sbp.block_layout import Digits, Dim, Layout, Mesh
from engines.sbp.instruction import Exchange, Instruction, Program, Unrunnable
from harness.core.plan import Plan
from harness.sbp import summa
from harness.sbp.device_grid import Degree, Strategy, Summa, minus, plus
from harness.sbp.matmul_chain import Attention, Chain, Item, Matmul, Residual
from harness.sbp.route_to_plan import OUTPUT


def program(plan: Plan, chain: Chain, mesh: Mesh) -> Program:
    """Return the program of a plan. Raises Unrunnable if the plan is not for this chain or its layouts do not match.

    A plan without strategies has stages only: each device computes whole matmuls.
    """
    if mesh.devices == 1 and not plan.strategy:
        return Program(Layout(), {})
    return _Writer(plan, chain, mesh).write()


@dataclass
class _Writer:
    plan: Plan
    chain: Chain
    mesh: Mesh
    at: Layout = field(default_factory=Layout)
    order: list[Digits] = field(default_factory=list)
    written: dict[str, Instruction] = field(default_factory=dict)
    embedded: Instruction | None = None
    summed: set[str] = field(default_factory=set)

    def write(self) -> Program:
        self.order = list(self.mesh.kinds)
        first = self.chain.matmuls[0]
        self.at = start = self._start(first)
        for number, item in enumerate(self.chain.items):
            following = self.chain.items[number + 1 :]
            if isinstance(item, Residual):
                self._branch(item)
            elif isinstance(item, Matmul):
                self._matmul(item, following, None)
        if OUTPUT in self.plan.layouts:
            self._finish()
        return Program(start, self.written)

    # -- where things lie -------------------------------------------------------------------------------------------

    def _degree(self, numbers: Sequence[int]) -> Degree:
        grid = self.mesh.grid
        nodes, local = numbers if len(numbers) == 2 else (1, numbers[0]) if grid.nodes == 1 else (numbers[0], 1)
        return grid.degree(nodes, local)

    def _strategy(self, item: Matmul) -> Strategy | Summa:
        return self.mesh.grid.strategy_or_mesh(self.plan.strategy[item.name])

    def _layouts(self, item: Matmul) -> list[Degree | None]:
        degrees = self.plan.layouts.get(item.name)
        if degrees is None:
            raise Unrunnable(f"the plan says nothing of {item.name}")
        return [self._degree(numbers) if numbers else None for numbers in degrees]

    def _front(self, degree: Degree) -> Digits:
        """Return the digits that split rows at this degree."""
        return tuple(sorted(digit for row, n in zip(self.order, degree, strict=True) for digit in row[:n]))

    def _start(self, first: Matmul) -> Layout:
        """Set the layout of the model's input: that of its first matmul, or split along the batch only."""
        strategy = self._strategy(first)
        if self._layouts(first)[0] is not None and not first.look_up:
            return Layout().split(rows=self._in_order(self.mesh.all))
        if isinstance(strategy, Summa):
            blocks = self._blocks(strategy)
            return blocks.with_columns(Dim()) if first.look_up else blocks
        columns = () if first.look_up else self._slice(strategy.p0, plus(strategy.p0, strategy.p2))
        rows = self._in_order(self._front(strategy.p0))
        return Layout().split(rows=rows, columns=self._in_order(columns)[::-1])

    def _slice(self, first: Degree, last: Degree) -> Digits:
        """Return the digits of each kind between two degrees."""
        rows = zip(self.order, first, last, strict=True)
        return tuple(sorted(digit for row, a, b in rows for digit in row[a:b]))

    def _in_order(self, digits: Iterable[int]) -> Digits:
        """Return the digits in the order in which they split rows; columns are split from the other end, so that both
        can be joined."""
        wanted = set(digits)
        return tuple(digit for row in self.order for digit in row if digit in wanted)

    def _rows(self) -> Degree:
        return self.mesh.count(tuple(self.at.rows.split))

    def _moved(self, at: Layout, target: Degree, axes: Digits | None = None) -> Exchange | None:
        """Return the all-to-all to the layout in which `target` digits split rows, in the order of `axes` if
        possible."""
        now, then = frozenset(at.rows.split), frozenset(self._front(target))
        digits = tuple(sorted(now ^ then))
        if not digits:
            return None
        joining, leaving = tuple(sorted(then - now)), tuple(sorted(now - then))
        rows = at.rows if axes is None else at.rows.along(axes)
        before = Layout(rows, at.columns)
        rows = rows.with_split(self._in_order(joining)).without(leaving)
        columns = at.columns.with_split(self._in_order(leaving)[::-1]).without(joining)
        return Exchange("all_to_all", digits, before, Layout(rows, columns))

    # -- what is written --------------------------------------------------------------------------------------------

    def _branch(self, branch: Residual) -> None:
        """Write the instructions of a branch: its output and the residual that it is added to need the same layout."""
        matmuls = [item for item in branch.items if isinstance(item, Matmul)]
        _, leaves, *elsewhere = self._layouts(matmuls[-1])
        self._move_on(elsewhere[0] if elsewhere else leaves)
        past = self.at
        for number, item in enumerate(branch.items):
            if not isinstance(item, Matmul):
                continue
            assert leaves is not None
            last = item is matmuls[-1]
            move = self._moved(past, leaves, self._arrives(item)[1].rows.axes) if last else None
            target = (move.after if move else past) if last else None
            self._matmul(item, branch.items[number + 1 :], target)
            if move:
                self.written[item.name] = replace(self.written[item.name], past=move)
        self.summed.add(matmuls[-1].name)

    def _move_on(self, place: Degree | None) -> None:
        """Let the producer move its output to the layout that both a branch and its residual start from."""
        move = self._moved(self.at, place) if place is not None else None
        if not move:
            return
        if not self.written:
            raise Unrunnable("the model begins with a residual branch, whose input would have to change its layout")
        name, made = list(self.written.items())[-1]
        self.at = move.after
        moved = replace(made, on=move) if name in self.summed else replace(made, after=move, output_layout=move.after)
        self.written[name] = moved

    def _arrives(self, item: Matmul) -> tuple[Exchange | None, Layout]:
        """Return the exchange before a matmul, and the layout of its input after it."""
        enters = self._layouts(item)[0]
        before = None if item.look_up or enters is None else self._moved(self.at, enters)
        return before, before.after if before else self.at

    def _matmul(self, item: Matmul, following: Sequence[Item], target: Layout | None) -> None:
        if isinstance(self._strategy(item), Summa):
            self._on_mesh(item, following)
            return
        enters, leaves, *between = self._layouts(item)
        assert leaves is not None
        p0 = self.mesh.grid.strategy(self.plan.strategy[item.name]).p0
        before, arrives = self._arrives(item)
        tied = self._tied(item)
        if tied and tied.panels:
            raise Unrunnable(f"{item.name} splits the tied weight in another way than {tied.item.name}")
        cut, kept = self._factors(item, tied)
        gather = None
        if cut and enters is not None and not item.look_up:
            gather = Exchange("all_gather", cut, arrives, arrives.merged(cut))
        inside = gather.after if gather else arrives
        split = self._split(minus(leaves, p0), kept)
        self._reorder({*self._front(p0), *split})
        columns = frozenset(cut) | (frozenset(kept) - frozenset(split))
        place = self._attention_place(item, leaves, following, between)
        axes = self._in_order(columns)[::-1] if place is None else self._axes(columns, place)
        if target:
            axes = target.columns.axes
        elif tied:
            axes = tied.inputs.axes + self._in_order(columns - set(cut))[::-1]
        outputs = Dim(axes, frozenset(cut))
        made = inside.with_columns(outputs)
        scattered = Layout(made.rows.with_split(split), Dim(axes, columns))
        scatter = Exchange("reduce_scatter", kept, made, scattered) if kept else None
        self.at = scattered
        self._check(item, leaves, target)
        if tied and not inside.columns.like(tied.outputs):
            raise Unrunnable(f"{item.name} needs other blocks of the tied weight than {tied.item.name}")
        instruction = Instruction(
            item, before, gather, scatter, None, inside.columns, outputs, self._front(p0), arrives, self.at, self.at
        )
        if item.look_up:
            instruction = replace(instruction, inputs=Dim().with_split(kept))
            self.embedded = self.embedded or instruction
        if place is not None:
            after = self._moved(self.at, place)
            self.at = after.after if after else self.at
            heads = 0 if item.parts else self._heads(following)
            instruction = replace(instruction, after=after, output_layout=self.at, heads=heads, attended=True)
        self.written[item.name] = instruction

    def _on_mesh(self, item: Matmul, following: Sequence[Item]) -> None:
        """Write the instruction of a matmul by SUMMA: it leaves the blocks in which its input arrives."""
        mesh = self._strategy(item)
        assert isinstance(mesh, Summa)
        before, arrives = self._arrives(item)
        if item.look_up:
            arrives = self._blocks(mesh)
        rows, columns = (dim.cut for dim in (arrives.rows, arrives.columns))
        if self.mesh.count(rows) != mesh.rows or {*rows} != arrives.rows.split or {*columns} != arrives.columns.split:
            raise Unrunnable(f"{item.name}: its input is not in blocks of the mesh")
        inputs, outputs = (Dim().with_split(digits) for digits in (rows, columns))
        if item.look_up:
            inputs, outputs = outputs, inputs
        self.at = arrives
        made = Instruction(item, before, None, None, None, inputs, outputs, (), arrives, arrives, arrives)
        attended = self._attention_place(item, mesh.rows, following, ()) is not None
        heads = 0 if item.parts else self._heads(following)
        panels = summa.panels(self.mesh.grid, mesh)
        made = self.written[item.name] = replace(made, panels=panels, attended=attended, heads=heads)
        tied = self._tied(item)
        if item.look_up:
            self.embedded = self.embedded or made
        elif tied and not (tied.panels and inputs.like(tied.outputs) and outputs.like(tied.inputs)):
            raise Unrunnable(f"{item.name} splits the tied weight in another way than {tied.item.name}")

    def _tied(self, item: Matmul) -> Instruction | None:
        """Return the instruction of the embedding that has the weight of a matmul, too."""
        return self.embedded if self.embedded and item.tied and item.tied == self.embedded.item.tied else None

    def _blocks(self, mesh: Summa) -> Layout:
        rows = self._front(mesh.rows)
        columns = set(self.mesh.all) - set(rows)
        return Layout().split(rows=self._in_order(rows), columns=self._in_order(columns)[::-1])

    def _factors(self, item: Matmul, tied: Instruction | None) -> tuple[Digits, Digits]:
        """Return the digits of p1 and of p2; a `tied` weight has those of its embedding."""
        p0, p1, p2 = self.mesh.grid.strategy(self.plan.strategy[item.name])
        if tied:
            kept, cut = tuple(sorted(tied.outputs.split)), tuple(sorted(tied.inputs.split))
            if (self.mesh.count(cut), self.mesh.count(kept)) != (p1, p2):
                raise Unrunnable(f"{item.name} splits the tied weight in another way than {tied.item.name}")
            return cut, kept
        enters = self._layouts(item)[0]
        rows = p0 if enters is None or item.look_up else enters  # with what is undone of them
        kept = self._slice(rows, plus(rows, p2))
        return tuple(sorted(set(self.mesh.all) - set(self._front(p0)) - set(kept))), kept

    def _split(self, added: Degree, kept: Digits) -> Digits:
        """Return the digits of p2 that will split rows: the next ones of each kind, or the first ones of p2."""
        found: list[int] = []
        for row, kind, n in zip(self.order, self.mesh.kinds, added, strict=True):
            found += [digit for digit in row if digit in kept and digit in kind][:n]
        return self._in_order(found)

    def _reorder(self, split: set[int]) -> None:
        """Move the digits that split rows to the front of the order."""
        self.order = [
            (*(digit for digit in row if digit in split), *(digit for digit in row if digit not in split))
            for row in self.order
        ]

    def _axes(self, columns: frozenset[int], place: Degree) -> Digits:
        """Return the axes of columns: first the digits that split them at `place`, so that a block there is in one
        piece."""
        there = set(self.mesh.all) - set(self._front(place))
        return self._in_order(there)[::-1] + self._in_order(columns - there)[::-1]

    def _attention_place(
        self, item: Matmul, leaves: Degree, following: Sequence[Item], between: Sequence[Degree | None]
    ) -> Degree | None:
        """Return the first layout that keeps heads whole, where attention reads the output: that in which it leaves the
        matmul, or enters the next one, or one between them."""
        heads = self._heads(following)
        if not heads:
            return None
        places = list(between) or [leaves]
        if not between and len(following) > 1 and isinstance(following[1], Matmul):
            places.append(self._layouts(following[1])[0])
        for place in places:
            if place is not None and heads % (self.mesh.devices // self.mesh.grid.size(place)) == 0:
                return place
        raise Unrunnable(f"no layout after {item.name} keeps {heads} attention heads whole")

    @staticmethod
    def _heads(following: Sequence[Item]) -> int:
        """Return the heads of the attention that follows, 0 if there is none."""
        return following[0].heads if following and isinstance(following[0], Attention) else 0

    def _finish(self) -> None:
        """Move the model's output to a layout that is split along the batch only."""
        name, last = list(self.written.items())[-1]
        after = self._moved(self.at, self.mesh.grid.all)
        if after:
            self.at = after.after
            self.written[name] = replace(last, after=after, output_layout=self.at)

    def _check(self, item: Matmul, leaves: Degree, target: Layout | None) -> None:
        if self._rows() != leaves or self.at.rows.split & self.at.columns.split:
            raise Unrunnable(f"{item.name}: the layout of its output differs from the plan's")
        if target and not self.at.like(target):
            raise Unrunnable(f"{item.name}: the layout of its output differs from that of the residual it is added to")
