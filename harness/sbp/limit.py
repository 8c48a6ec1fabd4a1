"""The cheapest strategies that fit into so many bytes, exactly.

Pricing bytes turns the limit into a plain search; the best price gives a bound from below, and a route that fits one
from above. What is between them is searched by `harness.sbp.between`.
"""

from __future__ import annotations

from harness.sbp.between import CLOSE, Between
from harness.sbp.optimum import Search
from harness.sbp.route import Infeasible, Route, Step
from harness.sbp.traffic import messages


class TooLarge(Infeasible):
    """Nothing fits; `least` bytes are needed."""

    def __init__(self, least: float) -> None:
        self.least = least
        super().__init__(f"at least {least:.0f} bytes are needed")


def within(search: Search, limit: float) -> Route:
    """The cheapest route that holds at most `limit` bytes on a device (`Costs.held`). Raises TooLarge."""
    search = search.priced(0.0)
    cheap, small = search.route(), search.priced(1.0, scale=0.0).route()
    if held(cheap, search) <= limit * (1 + CLOSE):
        return cheap
    if held(small, search) > limit * (1 + CLOSE):
        raise TooLarge(held(small, search))
    price, fits = _best_price(search, _true(cheap, search), _true(small, search), limit)
    return _true(Between(search, limit, price, fits).route(), search) if fits.seconds > cheap.seconds else fits


def held(route: Route, search: Search) -> float:
    """Bytes on a device; of one weight at both ends once."""
    steps = [step for step in route.steps if isinstance(step, Step)]
    return sum(search.costs.held(step.item, step.strategy) for step in steps[search.ties() :])


def _true(route: Route, search: Search) -> Route:
    """With its seconds, whatever it was searched by."""
    costs = search.costs
    told = (m.times * costs.collectives.seconds(m.name, m.degree, m.size) for m in messages(route, costs))
    return Route(route.steps, sum(told))


def _best_price(search: Search, cheap: Route, small: Route, limit: float) -> tuple[float, Route]:
    """The price that bounds best, seconds a byte, and the best route that fits: between two routes, one of each kind.

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
        found = _true(search.priced(price).route(), search)
        line = cheap.seconds + price * held(cheap, search)
        if found.seconds + price * held(found, search) >= line * (1 - CLOSE):
            return price, fits
        if held(found, search) > limit * (1 + CLOSE):
            cheap = found
        else:
            small = found
            fits = min(fits, found, key=lambda route: route.seconds)
