"""What a device sends in a step, by the formulas of table 2."""

from __future__ import annotations

from collections import defaultdict

from harness.sbp.collective_volume import messages
from harness.sbp.route import Route
from harness.sbp.strategy_costs import Costs

ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "broadcast": 1, "reduce": 1}


def sent(route: Route, costs: Costs) -> dict[str, float]:
    """By collective and phase, as "all_gather forward": bytes that a device sends; none where it sends nothing."""
    found: dict[str, float] = defaultdict(float)
    for message in messages(route, costs):
        members = costs.grid.size(message.degree)
        if members > 1:
            size = message.times * ROUNDS[message.name] * (members - 1) / members * message.size
            found[f"{message.name} {message.phase}"] += size
    return dict(found)
