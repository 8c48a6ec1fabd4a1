"""Converts a route to a plan: strategies, layouts, and what each stage's devices send; and a device's share of a
profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan, Stage, Traffic
from harness.core.products import Product
from harness.sbp import summa
from harness.sbp.collective_costs import Collectives
from harness.sbp.collective_volume import messages
from harness.sbp.device_grid import Degree, Grid, Strategy, Summa, grid_of
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual, chain_from_profile, matmul_name, part_names
from harness.sbp.shortest_path import Ends, Move, Route, Step
from harness.sbp.strategy_costs import Costs, exchange_bytes
from harness.simulator.layer_times import depth, price_shares

OUTPUT = "output"
"""The name of the model's output among the layouts."""
PHASES = ("forward", "backward", "weights")
"""Phases of communication: two in every micro-batch, and one in a step."""


def with_route(plan: Plan, route: Route, costs: Costs, profile: ModelProfile, ends: Ends) -> Plan:
    """Returns the plan with the route's strategies, layouts and traffic."""
    grid, route = costs.grid, _reduced_per_stage(plan.stages, route, profile)
    strategy = {name: grid.numbers(strategy) for name, strategy in route.strategies.items()}
    layouts: dict[str, tuple[tuple[int, ...], ...]] = {}
    if costs.rules.paths == "mixed":
        read = _read_by_attention(chain_from_profile(profile))
        for number, step in enumerate(route.steps):
            if isinstance(step, Step):
                enters = () if step.free else _numbers(grid, step.enters.rows)
                between = [_numbers(grid, rows) for rows in _third_layout(route, number, step.item.name in read)]
                layouts[step.item.name] = (enters, _numbers(grid, step.leaves.rows), *between)
        if ends == "batch_split":
            layouts[OUTPUT] = (_numbers(grid, grid.all),)
    return replace(plan, strategy=strategy, layouts=layouts, traffic=_traffic(plan, route, costs, profile))


def _reduced_per_stage(stages: Sequence[Stage], route: Route, profile: ModelProfile) -> Route:
    """Returns the route in which a weight on two stages is all-reduced in each of them."""
    steps = [step for step in route.steps if isinstance(step, Step)]
    ends = {_stage_of(stages, step.item.name, profile) for step in (steps[0], steps[-1])}
    if steps[0].reduced or len(ends) == 1:
        return route
    return replace(route, steps=(steps[0]._replace(reduced=True), *route.steps[1:]))


def _read_by_attention(chain: Chain) -> set[str]:
    """Returns the names of the matmuls whose output attention reads."""
    rows = [item.items for item in chain.items if isinstance(item, Residual)] + [chain.items]
    return {
        item.name
        for row in rows
        for item, following in pairwise(row)
        if isinstance(item, Matmul) and isinstance(following, Attention)
    }


def _third_layout(route: Route, number: int, attended: bool) -> list[Degree]:
    """Returns a third layout after step `number`, if there is one.

    That is attention's, if it is neither the output of the step nor the input of the next; or the layout from which the
    tensor moves that the step's output is added to.
    """
    first, second = [*route.steps[number + 1 : number + 3], None, None][:2]
    if not isinstance(first, Move):
        return []
    if first.past:
        return [first.source.rows]
    return [first.target.rows] if attended and isinstance(second, Move) and not second.past else []


def _numbers(grid: Grid, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the number of devices that split rows; on several nodes of several devices (nodes, devices of each)."""
    return grid.parts(rows) if grid.nodes > 1 and grid.local > 1 else (grid.size(rows),)


def grid_from_plan(plan: Plan) -> Grid:
    """Returns the grid of a plan's strategies; one row of devices where no number distinguishes nodes."""
    numbers = next(iter(plan.strategy.values()), (1, 1, 1))
    if len(numbers) in (2, 3):  # a mesh, or three factors
        return grid_of(1, prod(numbers))
    return grid_of(prod(numbers[::2]), prod(numbers[1::2]))


Sent = dict[tuple[str, str], tuple[float, float]]
"""(collective, phase): seconds and bytes of a micro-batch, in phase "weights" of a step."""


def sent_by_matmul(route: Route, costs: Costs) -> dict[str, Sent]:
    """Returns what a device sends for each matmul.

    A move belongs to the next matmul, one past a branch to the previous one, and the last move to the last matmul.
    """
    sent: dict[str, Sent] = {step.item.name: {} for step in route.steps if isinstance(step, Step)}
    for step, owner in zip(route.steps, _owners(route), strict=True):
        for message in messages(Route((step,), 0.0), costs):
            times = message.times if message.phase == "weights" else message.times // costs.micro_batches
            size = times * Collectives.sent_by_all(message.name, message.size, costs.grid.size(message.degree))
            if size:
                seconds = times * costs.collectives.seconds(message.name, message.degree, message.size)
                _add(sent[owner], message.name, message.phase, seconds, size)
    return sent


def matmul_figures(route: Route, costs: Costs) -> dict[str, dict[str, Any]]:
    """Returns for each matmul, for one device and step, "seconds" by phase, "bytes" sent by collective, and
    "held_bytes".

    One weight at both ends is counted with the last matmul.
    """
    figures: dict[str, dict[str, Any]] = {}
    for step in route.steps:
        if isinstance(step, Step):
            held = round(costs.held(step.item, step.strategy)) if step.reduced else 0
            figures[step.item.name] = {"seconds": dict.fromkeys(PHASES, 0.0), "bytes": {}, "held_bytes": held}
    for name, sent in sent_by_matmul(route, costs).items():
        for (algorithm, phase), (seconds, size) in sent.items():
            times = 1 if phase == "weights" else costs.micro_batches
            figures[name]["seconds"][phase] += times * seconds
            figures[name]["bytes"][algorithm] = figures[name]["bytes"].get(algorithm, 0) + times * round(size)
    return figures


def _add(sent: Sent, name: str, phase: str, seconds: float, size: float) -> None:
    total = sent.get((name, phase), (0.0, 0.0))
    sent[name, phase] = total[0] + seconds, total[1] + size


def _owners(route: Route) -> list[str]:
    """Returns the name of the matmul that each step belongs to."""
    names = [step.item.name if isinstance(step, Step) else "" for step in route.steps]
    previous, following = _last_names(names), reversed(_last_names(reversed(names)))
    return [
        before or after if isinstance(step, Move) and step.past else after or before
        for step, before, after in zip(route.steps, previous, following, strict=True)
    ]


def _last_names(names: Iterable[str]) -> list[str]:
    """Returns at each place the last name up to there that is not empty."""
    found = [""]
    for name in names:
        found.append(name or found[-1])
    return found[1:]


def _traffic(plan: Plan, route: Route, costs: Costs, profile: ModelProfile) -> tuple[tuple[Traffic, ...], ...]:
    """Returns the traffic of each stage. Recomputed layers (all but the model's last) repeat their forward traffic."""
    sent_by_stage: list[Sent] = [{} for _ in plan.stages]
    for name, sent in sent_by_matmul(route, costs).items():
        recomputed = plan.recompute != "never" and layer_index(name, profile) < len(profile.layers) - 1
        for (algorithm, phase), (seconds, size) in sent.items():
            of_stage = sent_by_stage[_stage_of(plan.stages, name, profile)]
            _add(of_stage, algorithm, phase, seconds, size)
            if recomputed and phase == "forward":
                _add(of_stage, algorithm, "recompute", seconds, size)
    return tuple(
        tuple(Traffic(*kind, seconds, round(size)) for kind, (seconds, size) in stage_traffic.items())
        for stage_traffic in sent_by_stage
    )


def _stage_of(stages: Sequence[Stage], name: str, profile: ModelProfile) -> int:
    layer = layer_index(name, profile)
    return next(number for number, stage in enumerate(stages) if stage.first <= layer <= stage.last)


def layer_index(name: str, profile: ModelProfile) -> int:
    """Returns the index of the layer that a matmul belongs to: "block_1.mlp.up" to "block_1"."""
    numbers, layer = profile.numbers, name
    while layer not in numbers:
        layer, dot, _ = layer.rpartition(".")
        if not dot:
            raise ValueError(f"no layer of {profile.model or 'the model'} has the matmul {name!r}")
    return numbers[layer]


def device_share(profile: ModelProfile, plan: Plan, chain: Chain) -> ModelProfile:
    """Returns the profile of one device of each stage: its share of the work, the weights and the saved tensors.

    Work, outputs and saved tensors are split evenly over the tensor parallel size; a gathered input is kept whole.
    Weights are split by p1 p2, and evenly where the plan has no strategies. So are times, but for the part that fewer
    samples take, too (`LayerProfile.shared_by`), unless smaller matmuls are known to be less efficient
    (`harness.simulator.layer_times.price_shares`). Buffers of exchanges are not included: see `with_exchanges`.
    """
    devices = plan.mesh.tensor
    if devices == 1:
        return profile
    grid = grid_from_plan(plan)
    elsewhere = [0.0] * len(profile.layers)
    frozen = [0.0] * len(profile.layers)
    gathered = [0.0] * len(profile.layers)
    for item in chain.matmuls:
        layer = layer_index(item.name, profile)
        if item.name not in plan.strategy:
            away = item.weight_bytes * (1 - 1 / devices)
        else:
            strategy = grid.strategy_or_mesh(plan.strategy[item.name])
            away = item.weight_bytes * (1 - 1 / _weight_parts(grid, strategy))
            saved = profile.layers[layer].saved_bytes
            gathered[layer] += _gathered_bytes(item, grid, strategy, chain.element_bytes, saved)
        elsewhere[layer] += away
        frozen[layer] += away if item.frozen else 0.0
    layers = [
        _share(layer, devices, round(elsewhere[number]), round(frozen[number]), round(gathered[number]))
        for number, layer in enumerate(profile.layers)
    ]
    skips = tuple(replace(skip, bytes=skip.bytes // devices) for skip in profile.skips)
    shares = replace(profile, layers=tuple(layers), skips=skips, input_bytes=profile.input_bytes // devices)
    parts = {
        part: _summed_parts(grid, grid.strategy_or_mesh(numbers))
        for name, numbers in plan.strategy.items()
        for part in part_names(name)
    }
    return price_shares(shares, [depth(_matmuls_on_device(layer, parts)) for layer in profile.layers])


def _matmuls_on_device(layer: LayerProfile, parts: Mapping[str, int]) -> list[Product]:
    """Returns the matmuls of a layer, each with its depth on one device, where it is split into so many `parts`."""
    return [
        replace(product, in_=product.in_ // parts.get(matmul_name(layer, product), 1))
        if product.weight_bytes
        else product
        for product in layer.products
    ]


def _weight_parts(grid: Grid, strategy: Strategy | Summa) -> int:
    if isinstance(strategy, Summa):
        return grid.size(grid.all)
    return grid.size(strategy.p1) * grid.size(strategy.p2)


def _summed_parts(grid: Grid, strategy: Strategy | Summa) -> int:
    """Returns into how many parts what is summed over is cut, in each of a device's products."""
    return summa.panels(grid, strategy) if isinstance(strategy, Summa) else grid.size(strategy.p2)


def _gathered_bytes(item: Matmul, grid: Grid, strategy: Strategy | Summa, width: int, saved: int) -> float:
    """Returns the bytes of a gathered input beyond its even share, which it replaces.

    Where an earlier layer keeps the input (the matmul's own layer has `saved` fewer bytes), its share stays allocated.
    """
    if item.look_up or isinstance(strategy, Summa) or grid.size(strategy.p1) == 1:
        return 0.0
    size = item.input_elements * width
    replaced = size / grid.size(grid.all) if saved >= size else 0.0
    return size / (grid.size(strategy.p0) * grid.size(strategy.p2)) - replaced


def with_exchanges(share: ModelProfile, plan: Plan, chain: Chain) -> ModelProfile:
    """Adds to a device's profile (`device_share`) the buffers of its backward passes while they exchange gradients.

    They grow where weights are split into more parts, so that a plan with less state may need more memory.
    """
    grid, working = grid_from_plan(plan), [0.0] * len(share.layers)
    for item in chain.matmuls:
        if item.name in plan.strategy:
            layer = layer_index(item.name, share)
            strategy = grid.strategy_or_mesh(plan.strategy[item.name])
            working[layer] = max(working[layer], exchange_bytes(item, grid, strategy, chain.element_bytes))
    return replace(
        share,
        layers=tuple(
            replace(
                layer,
                working_bytes=layer.working_bytes + round(more),
                backward_bytes=layer.backward_bytes + round(more) if layer.backward_bytes else 0,
            )
            if more
            else layer
            for layer, more in zip(share.layers, working, strict=True)
        ),
    )


def _share(layer: LayerProfile, devices: int, elsewhere: int, frozen: int, gathered: int) -> LayerProfile:
    """Returns one device's share of a layer; `elsewhere` are the bytes of its weights on other devices, of which
    `frozen` are not trained."""
    tied = tuple(replace(parameter, bytes=max(0, parameter.bytes - elsewhere)) for parameter in layer.tied)
    forward_s, backward_s = layer.shared_by(devices, elsewhere)
    return replace(
        layer,
        forward_s=forward_s,
        backward_s=backward_s,
        flops=layer.flops / devices,
        bytes_moved=layer.bytes_moved / devices,
        elementwise_bytes=layer.elementwise_bytes / devices,
        param_bytes=layer.param_bytes - elsewhere,
        frozen_bytes=layer.frozen_bytes - frozen,
        norm_bytes=layer.norm_bytes // devices,
        output_bytes=layer.output_bytes // devices,
        saved_bytes=layer.saved_bytes // devices + gathered,
        working_bytes=layer.working_bytes // devices,
        backward_bytes=layer.backward_of(1 / devices, 1 - elsewhere / max(1, layer.param_bytes)),
        tied=tied,
    )
