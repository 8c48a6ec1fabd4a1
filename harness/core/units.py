"""Numbers as text, with a fitting unit: bytes, seconds, rates, FLOP/s, shares."""

from __future__ import annotations

UNKNOWN = "-"


def size(count: float | None, digits: int = 1) -> str:
    """Formats bytes with a binary unit: 812.0 MiB."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def sizes(first: int, second: int) -> tuple[str, str]:
    """Formats two different numbers of bytes with as many digits as it takes to differ, at last in whole bytes."""
    for digits in (1, 2, 3):
        if size(first, digits) != size(second, digits):
            return size(first, digits), size(second, digits)
    return f"{first} B", f"{second} B"


def seconds(value: float | None) -> str:
    """Formats seconds with a fitting unit: 85.0 us, 129.7 ms, 12.34 s."""
    if value is None:
        return UNKNOWN
    if 0 < value < 1e-3:
        return f"{value * 1e6:.1f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def age(value: float) -> str:
    """Formats an age in seconds, roughly: 40 s, 3 min, 5 h, 12 d."""
    for unit, length in (("s", 60), ("min", 60), ("h", 24)):
        if value < length:
            return f"{value:.0f} {unit}"
        value /= length
    return f"{value:.0f} d"


UPPER_BOUND = "upper bound: not calibrated"
"""What is said of a speed whose layer times are the least that a device's data sheet allows."""
AT_MOST = "<="
"""Its mark in tables."""


def rate(value: float | None, unit: str = "samples/s") -> str:
    """Formats a rate, four digits: 123.4 samples/s."""
    if value is None:
        return UNKNOWN
    return (f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}").rstrip()


def flops(value: float) -> str:
    """Formats FLOP/s with a decimal unit: 12.3 GFLOP/s."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.1f} {unit}FLOP/s"
        value /= 1000
    return f"{value:.1f} PFLOP/s"


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.0f} %"


def ratio(predicted: float | None, measured: float | None) -> str:
    """Formats predicted / measured; "-" where one of them is not known or nothing was measured."""
    return UNKNOWN if predicted is None or not measured else f"{predicted / measured:.2f}"


def number(value: float | None) -> str:
    """Formats a loss."""
    return UNKNOWN if value is None else f"{value:.4f}"
