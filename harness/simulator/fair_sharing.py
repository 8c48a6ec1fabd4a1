"""Fair sharing of a resource: by transfers through a node's port, and by CPU devices on their node's cores.

A flow has an amount (bytes, or seconds of work), a largest rate of its own, and the resources that it crosses. At
every moment the rates are max-min fair: all grow equally until a resource is full or a flow has its largest rate.

    port 12 GB/s   flow a |== 6 GB/s ==|=== 12 GB/s ===|
                   flow b |== 6 GB/s ==|

A resource may give more to a flow that has it alone than several get together (`alone`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

Resource = Hashable


@dataclass(frozen=True)
class Flow:
    """A transfer or a piece of work; `uses` counts how often it crosses each resource, simulated replica or not."""

    amount: float
    cap: float
    uses: Mapping[Resource, float]


class Flows:
    """The flows in progress; time only goes forward."""

    def __init__(self, capacity: Mapping[Resource, float], alone: Mapping[Resource, float] | None = None) -> None:
        self.capacity, self.alone = capacity, alone or {}
        self.flows: dict[int, Flow] = {}
        self.left: dict[int, float] = {}
        self.rate: dict[int, float] = {}
        self.now = 0.0

    def add(self, key: int, flow: Flow, now: float) -> None:
        self._advance(now)
        self.flows[key], self.left[key] = flow, flow.amount
        self.rate = fair_rates(self.flows, self.capacity, self.alone)

    def next(self) -> tuple[float, int]:
        """Returns when the next flow ends, and its key; infinity where there is none."""
        ends = ((self.now + self.left[key] / rate, key) for key, rate in self.rate.items())
        return min(ends, default=(float("inf"), -1))

    def end(self, key: int, now: float) -> None:
        self._advance(now)
        del self.flows[key], self.left[key]
        self.rate = fair_rates(self.flows, self.capacity, self.alone)

    def _advance(self, now: float) -> None:
        for key, rate in self.rate.items():
            self.left[key] = max(0.0, self.left[key] - rate * (now - self.now))
        self.now = now


def fair_rates(
    flows: Mapping[int, Flow], capacity: Mapping[Resource, float], alone: Mapping[Resource, float] | None = None
) -> dict[int, float]:
    """Returns the max-min fair rate of each flow, by progressive filling.

    A resource that one flow crosses, once, has its rate of `alone`, where there is one, instead of its `capacity`.
    """
    rates: dict[int, float] = {}
    left = dict(capacity)
    if alone:
        crossing = _crossing(flows)
        left |= {resource: rate for resource, rate in alone.items() if crossing.get(resource, 0.0) == 1}
    growing = dict(flows)
    while growing:
        shares = _shares(growing, left)
        key = min(growing, key=lambda k: (min(growing[k].cap, shares[k]), k))
        rate = min(growing[key].cap, shares[key])
        for k in [k for k in growing if min(growing[k].cap, shares[k]) <= rate]:
            rates[k] = rate
            for resource, times in growing.pop(k).uses.items():
                left[resource] = max(0.0, left[resource] - rate * times)
    return rates


def _shares(flows: Mapping[int, Flow], left: Mapping[Resource, float]) -> dict[int, float]:
    """Returns the rate of each flow if all resources that it crosses were shared equally by the flows on them."""
    crossing = _crossing(flows)
    return {
        key: min((left[resource] / crossing[resource] for resource in flow.uses), default=float("inf"))
        for key, flow in flows.items()
    }


def _crossing(flows: Mapping[int, Flow]) -> dict[Resource, float]:
    """Returns how often all flows together cross each resource."""
    crossing: dict[Resource, float] = {}
    for flow in flows.values():
        for resource, times in flow.uses.items():
            crossing[resource] = crossing.get(resource, 0.0) + times
    return crossing
