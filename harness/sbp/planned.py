"""Between a route and what a plan says of it: strategies, layouts, and what each stage's devices send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from harness.costs import depth, of_shares
from harness.plan import Plan, Stage, Traffic
from harness.profile import LayerProfile, ModelProfile, Product
from harness.sbp.chain import Attention, Chain, Matmul, Residual, chain_of, name_of
from harness.sbp.collectives import Collectives
from harness.sbp.costs import Costs
from harness.sbp.grid import Degree, Grid, Strategy
from harness.sbp.optimum import Ends, Move, Route, Step
from harness.sbp.traffic import messages
from harness.simulate.routes import STEPS

OUTPUT = "output"
"""The name of the model's output among the layouts."""
EXCHANGED = 3
"""Times that a buffer is there while it is gathered or its parts are summed: as it was made, in the order of those that
get its parts, and once more as it comes from others."""
PHASES = ("forward", "backward", "weights")
"""Of what is sent: in every micro-batch twice, and once in a step."""


def with_route(plan: Plan, route: Route, costs: Costs, profile: ModelProfile, ends: Ends) -> Plan:
    """The plan with the route's strategies, layouts and traffic."""
    grid, route = costs.grid, _each_reduced(plan.stages, route, profile)
    strategy = {name: grid.numbers(strategy) for name, strategy in route.strategies.items()}
    layouts: dict[str, tuple[tuple[int, ...], ...]] = {}
    if costs.rules.paths == "mixed":
        read = _attended(chain_of(profile))
        for number, step in enumerate(route.steps):
            if isinstance(step, Step):
                enters = () if step.free else _numbers(grid, step.enters.rows)
                between = [_numbers(grid, rows) for rows in _third(route, number, step.item.name in read)]
                layouts[step.item.name] = (enters, _numbers(grid, step.leaves.rows), *between)
        if ends == "batch_split":
            layouts[OUTPUT] = (_numbers(grid, grid.all),)
    return replace(plan, strategy=strategy, layouts=layouts, traffic=_traffic(plan, route, costs, profile))


def _each_reduced(stages: Sequence[Stage], route: Route, profile: ModelProfile) -> Route:
    """A weight that two stages have is summed in each of them."""
    steps = [step for step in route.steps if isinstance(step, Step)]
    ends = {_stage_of(stages, step.item.name, profile) for step in (steps[0], steps[-1])}
    if steps[0].reduced or len(ends) == 1:
        return route
    return replace(route, steps=(steps[0]._replace(reduced=True), *route.steps[1:]))


def _attended(chain: Chain) -> set[str]:
    """The products whose output attention reads."""
    rows = [item.items for item in chain.items if isinstance(item, Residual)] + [chain.items]
    return {
        one.name for row in rows for one, following in pairwise(row)
        if isinstance(one, Matmul) and isinstance(following, Attention)
    }  # fmt: skip


def _third(route: Route, number: int, attended: bool) -> list[Degree]:
    """Where attention lies behind step `number`, if that is neither where the step leaves nor where the next enters; or
    from where comes what the step's output is added to."""
    first, second = [*route.steps[number + 1 : number + 3], None, None][:2]
    if not isinstance(first, Move):
        return []
    if first.past:
        return [first.source.rows]
    return [first.target.rows] if attended and isinstance(second, Move) and not second.past else []


def _numbers(grid: Grid, rows: tuple[int, ...]) -> tuple[int, ...]:
    """By how many devices rows are split; on several nodes of several devices (nodes, devices of each)."""
    return grid.parts(rows) if grid.nodes > 1 and grid.local > 1 else (grid.size(rows),)


def grid_of_plan(plan: Plan) -> Grid:
    """The grid that its strategies are for; one row of devices where no number tells nodes apart."""
    numbers = next(iter(plan.strategy.values()), (1, 1, 1))
    if len(numbers) == 3:
        return Grid(1, numbers[0] * numbers[1] * numbers[2])
    return Grid(numbers[0] * numbers[2] * numbers[4], numbers[1] * numbers[3] * numbers[5])


Sent = dict[tuple[str, str], tuple[float, float]]
"""(collective, phase): seconds and bytes of a micro-batch, in phase "weights" of a step."""


def sent_by_product(route: Route, costs: Costs) -> dict[str, Sent]:
    """What a device sends for each product; a move belongs to the product behind it, one past a branch to that before.

    The last move, behind which there is none, belongs to the last product.
    """
    found: dict[str, Sent] = {step.item.name: {} for step in route.steps if isinstance(step, Step)}
    for step, owner in zip(route.steps, _owners(route), strict=True):
        for message in messages(Route((step,), 0.0), costs):
            times = message.times if message.phase == "weights" else 1
            size = times * STEPS[message.name] * Collectives.sent(message.size, costs.grid.size(message.degree))
            if size:
                seconds = times * costs.collectives.seconds(message.name, message.degree, message.size)
                _add(found[owner], message.name, message.phase, seconds, size)
    return found


def per_product(route: Route, costs: Costs) -> dict[str, dict[str, Any]]:
    """Of one device and one step: "seconds" by phase, "bytes" sent by collective, and "held_bytes", for each product.

    What is held of one weight at both ends is counted with the last product.
    """
    found: dict[str, dict[str, Any]] = {}
    for step in route.steps:
        if isinstance(step, Step):
            held = round(costs.held(step.item, step.strategy)) if step.reduced else 0
            found[step.item.name] = {"seconds": dict.fromkeys(PHASES, 0.0), "bytes": {}, "held_bytes": held}
    for name, sent in sent_by_product(route, costs).items():
        for (algorithm, phase), (seconds, size) in sent.items():
            times = 1 if phase == "weights" else costs.micro_batches
            found[name]["seconds"][phase] += times * seconds
            found[name]["bytes"][algorithm] = found[name]["bytes"].get(algorithm, 0) + times * round(size)
    return found


def _add(sent: Sent, name: str, phase: str, seconds: float, size: float) -> None:
    before = sent.get((name, phase), (0.0, 0.0))
    sent[name, phase] = before[0] + seconds, before[1] + size


def _owners(route: Route) -> list[str]:
    """The name of the product that each step belongs to."""
    names = [step.item.name if isinstance(step, Step) else "" for step in route.steps]
    found = []
    for number, (step, name) in enumerate(zip(route.steps, names, strict=True)):
        before, behind = reversed(names[:number]), names[number:]
        near = [*before, *behind] if isinstance(step, Move) and step.past else [*behind, *before]
        found.append(name or next(filter(None, near)))
    return found


def _traffic(plan: Plan, route: Route, costs: Costs, profile: ModelProfile) -> tuple[tuple[Traffic, ...], ...]:
    """Of each stage. Layers that are computed again (all but the model's last) say again what they say forward."""
    found: list[Sent] = [{} for _ in plan.stages]
    for name, sent in sent_by_product(route, costs).items():
        again = plan.recompute != "never" and layer_of(name, profile) < len(profile.layers) - 1
        for (algorithm, phase), (seconds, size) in sent.items():
            own = found[_stage_of(plan.stages, name, profile)]
            _add(own, algorithm, phase, seconds, size)
            if again and phase == "forward":
                _add(own, algorithm, "recompute", seconds, size)
    return tuple(tuple(Traffic(*kind, seconds, round(size)) for kind, (seconds, size) in one.items()) for one in found)


def _stage_of(stages: Sequence[Stage], name: str, profile: ModelProfile) -> int:
    layer = layer_of(name, profile)
    return next(number for number, stage in enumerate(stages) if stage.first <= layer <= stage.last)


def layer_of(name: str, profile: ModelProfile) -> int:
    """The number of the layer that a product belongs to."""
    matching = [n for n, layer in enumerate(profile.layers) if name == layer.name or name.startswith(f"{layer.name}.")]
    return max(matching, key=lambda n: len(profile.layers[n].name))


def of_device(profile: ModelProfile, plan: Plan, chain: Chain) -> ModelProfile:
    """The profile of one of the devices of each stage: its share of the work, of the weights and of what is saved.

    Work, outputs and what is saved are split evenly; an input that was gathered is kept as it was gathered. Weights are
    split by p1 p2, and evenly where the plan has no strategies. So are times, unless smaller products are known to be
    less efficient (`harness.costs.of_shares`). What exchanges hold meanwhile is not in it: see `with_exchanges`.
    """
    devices = plan.mesh.tensor
    if devices == 1:
        return profile
    grid = grid_of_plan(plan)
    elsewhere = [0.0] * len(profile.layers)
    gathered = [0.0] * len(profile.layers)
    for item in chain.matmuls:
        layer = layer_of(item.name, profile)
        if item.name not in plan.strategy:
            elsewhere[layer] += item.weight_bytes * (1 - 1 / devices)
            continue
        strategy = grid.strategy(plan.strategy[item.name])
        elsewhere[layer] += item.weight_bytes * (1 - 1 / _cut(grid, strategy))
        gathered[layer] += _gathered(item, grid, strategy, chain.element_bytes, profile.layers[layer].saved_bytes)
    layers = [
        _share(layer, devices, round(elsewhere[number]), round(gathered[number]))
        for number, layer in enumerate(profile.layers)
    ]
    skips = tuple(replace(skip, bytes=skip.bytes // devices) for skip in profile.skips)
    shares = replace(profile, layers=tuple(layers), skips=skips, input_bytes=profile.input_bytes // devices)
    return of_shares(shares, [depth(_parts(layer, plan, grid)) for layer in profile.layers])


def _parts(layer: LayerProfile, plan: Plan, grid: Grid) -> list[Product]:
    """The products of a layer, each as deep as on a device."""
    found = []
    for product in layer.products:
        numbers = plan.strategy.get(name_of(layer, product)) if product.weight_bytes else None
        parts = grid.size(grid.strategy(numbers).p2) if numbers else 1
        found.append(replace(product, in_=product.in_ // parts))
    return found


def _cut(grid: Grid, strategy: Strategy) -> int:
    return grid.size(strategy.p1) * grid.size(strategy.p2)


def _gathered(item: Matmul, grid: Grid, strategy: Strategy, width: int, saved: int) -> float:
    """Bytes of a gathered input beyond its even share, which it takes the place of; where an earlier layer keeps the
    input (the product's own layer has `saved` less than that), its share stays beside the gathered one."""
    if item.look_up or grid.size(strategy.p1) == 1:
        return 0.0
    size = item.input_elements * width
    replaced = size / grid.size(grid.all) if saved >= size else 0.0
    return size / (grid.size(strategy.p0) * grid.size(strategy.p2)) - replaced


def with_exchanges(share: ModelProfile, plan: Plan, chain: Chain) -> ModelProfile:
    """A device's profile (`of_device`) with what its backward passes work with while they exchange gradients.

    It grows where weights are split into more parts, so that a plan with less state may need more.
    """
    grid, working = grid_of_plan(plan), [0.0] * len(share.layers)
    for item in chain.matmuls:
        if item.name in plan.strategy:
            layer = layer_of(item.name, share)
            strategy = grid.strategy(plan.strategy[item.name])
            working[layer] = max(working[layer], _between(item, grid, strategy, chain.element_bytes))
    return replace(share, layers=tuple(
        replace(layer, working_bytes=layer.working_bytes + round(more))
        for layer, more in zip(share.layers, working, strict=True)
    ))  # fmt: skip


def _between(item: Matmul, grid: Grid, strategy: Strategy, width: int) -> float:
    """Bytes of a product's backward pass beyond the even shares of the gradients of its output and its input.

    gradient of y --all_gather over p2--> of partial sums of y --> partial sums of that of x --reduce_scatter over p1-->
    """
    devices = grid.size(grid.all)
    x, y = 0 if item.look_up else item.input_elements * width, item.output_elements * width
    p0, p1, p2 = (grid.size(degree) for degree in (strategy.p0, strategy.p1, strategy.p2))
    taken, made = x / (p0 * p2), y / (p0 * p1)
    moments = [
        y / devices + (EXCHANGED * made if p2 > 1 else 0),
        made + taken,
        x / devices + ((EXCHANGED - 1) * taken if p1 > 1 else 0),  # the gathered input is gone by then
    ]
    return max(moments) - (x + y) / devices


def _share(layer: LayerProfile, devices: int, elsewhere: int, gathered: int) -> LayerProfile:
    """`elsewhere` are bytes of its weights that other devices have."""
    tied = tuple(replace(one, bytes=max(0, one.bytes - elsewhere)) for one in layer.tied)
    return replace(
        layer,
        forward_s=layer.forward_s / devices,
        backward_s=layer.backward_s / devices,
        flops=layer.flops / devices,
        bytes_moved=layer.bytes_moved / devices,
        elementwise_bytes=layer.elementwise_bytes / devices,
        param_bytes=layer.param_bytes - elsewhere,
        output_bytes=layer.output_bytes // devices,
        saved_bytes=layer.saved_bytes // devices + gathered,
        working_bytes=layer.working_bytes // devices,
        tied=tied,
    )
