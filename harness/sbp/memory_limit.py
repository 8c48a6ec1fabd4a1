"""The cheapest strategies that fit into a limit of bytes, exactly.

A price for each byte turns the limit into a shortest path search (Lagrangian relaxation). The best price gives a lower
bound, a route that fits an upper one; `harness.sbp.bounded_search` searches between them.
"""

from __future__ import annotations

from harness.sbp.bounded_search import CLOSE, BoundedSearch
from harness.sbp.collective_volume import messages
from harness.sbp.route import Infeasible, Route, Step
from harness.sbp.shortest_path import Search
from harness.sbp.strategy_costs import Costs


class TooLarge(Infeasible):
    """No route fits; `least` bytes are needed."""

    def __init__(self, least: float) -> None:
        self.least = least
        super().__init__(f"at least {least:.0f} bytes are needed")


def cheapest_within(search: Search, limit: float) -> Route:
    """Returns the cheapest route that holds at most `limit` bytes on a device (`Costs.held`). Raises TooLarge."""
    cheap, small = search.best(0.0), search.best(1.0, scale=0.0)
    if held(cheap, search) <= limit * (1 + CLOSE):
        return cheap
    if held(small, search) > limit * (1 + CLOSE):
        raise TooLarge(held(small, search))
    price, fits = _best_price(search, with_seconds(cheap, search.costs), with_seconds(small, search.costs), limit)
    return (
        with_seconds(BoundedSearch(search.priced(0.0), limit, price, fits).route(), search.costs)
        if fits.seconds > cheap.seconds
        else fits
    )


def held(route: Route, search: Search) -> float:
    """Returns the bytes on a device; one weight at both ends counts once."""
    steps = [step for step in route.steps if isinstance(step, Step)]
    return sum(search.costs.held(step.item, step.strategy) for step in steps[search.ties() :])


def with_seconds(route: Route, costs: Costs) -> Route:
    """Returns the route with the seconds of all its collectives in a step."""
    seconds = (m.times * costs.collectives.seconds(m.name, m.degree, m.size) for m in messages(route, costs))
    return Route(route.steps, sum(seconds))


def _best_price(search: Search, cheap: Route, small: Route, limit: float) -> tuple[float, Route]:
    """Returns the price with the best bound (seconds per byte), and the best route that fits, between these two routes.

    seconds |x cheap
            |   \\  price
            |      x  a route below the line is the next of its kind
            |         \\
            |   limit    x small
            +-----|---------- bytes
    """
    fits = small
    while True:
        more = held(cheap, search) - held(small, search)
        price = max(0.0, (small.seconds - cheap.seconds) / more)
        route = with_seconds(search.best(price), search.costs)
        line = cheap.seconds + price * held(cheap, search)
        if route.seconds + price * held(route, search) >= line * (1 - CLOSE):
            return price, fits
        if held(route, search) > limit * (1 + CLOSE):
            cheap = route
        else:
            small = route
            fits = min(fits, route, key=lambda route: route.seconds)
