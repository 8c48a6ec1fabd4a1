"""The passes of a batch norm over activations in a CPU's memory, compiled by numba: each reads a channel once or twice
while it is in the core's cache, which takes an eighth of the time of torch's statistics; and it is one call where torch
has several. `engines.sbp.batchnorm_passes` says what they compute. Sums are in float64.

Arguments are addresses, which torch gives in a tenth of the time that an array takes, and sizes:

    x, dy, y, dx           (samples, channels, pixels), each in one piece
    parts                  (devices, 2, channels), `stride` numbers from one device's to the next one's
    statistics             (3, channels): mean, biased variance, and inverse deviation over all devices
    weight, bias           (channels)

numba keeps the machine code next to this file, or in NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_ssize_t, c_void_p
from typing import Any

import numba
import numpy as np
from numba import carray, float32, float64, intp, void
from numba.core.types import CPointer

if vars(numba.config)["DISABLE_JIT"]:
    raise ImportError("NUMBA_DISABLE_JIT is set")

ANY_ORDER = {"reassoc", "contract", "nsz"}
"""Sums may be taken in any order, by several lanes of a core at once; infinities and NaN stay what they are."""
SIZES = 3
"""Samples, channels, pixels."""
MACHINE_CODE: list[Any] = []
"""Of all functions, kept as long as their addresses."""


def _compiled(addresses: int, numbers: int = 0, counts: int = SIZES) -> Callable[[Any], dict[str, Any]]:
    """Compile a function of so many addresses, numbers in float64, and counts, for each dtype by its name."""
    called = ctypes.CFUNCTYPE(None, *[c_void_p] * addresses, *[c_double] * numbers, *[c_ssize_t] * counts)

    def made(function: Any) -> dict[str, Any]:
        found = {}
        for dtype in (float32, float64):
            signature = void(*[CPointer(dtype)] * addresses, *[float64] * numbers, *[intp] * counts)
            code = numba.cfunc(signature, cache=True, fastmath=ANY_ORDER, error_model="numpy")(function)
            MACHINE_CODE.append(code)
            found[f"torch.{dtype}"] = called(code.address or 0)
        return found

    return made


@_compiled(2)
def own_statistics(x_at, found_at, samples, channels, pixels):  # type: ignore[no-untyped-def]
    """`found` (2, channels) gets mean and biased variance."""
    x, found = carray(x_at, (samples, channels, pixels)), carray(found_at, (2, channels))
    count = samples * pixels
    for channel in range(channels):
        total = 0.0
        for sample in range(samples):
            row = x[sample, channel]
            for k in range(pixels):
                total += row[k]
        mean, squares = total / count, 0.0
        for sample in range(samples):
            row = x[sample, channel]
            for k in range(pixels):
                squares += (row[k] - mean) * (row[k] - mean)
        found[0, channel], found[1, channel] = mean, squares / count


@_compiled(8, numbers=2, counts=2 + SIZES)
def normalize(  # type: ignore[no-untyped-def]
    x_at, parts_at, weight_at, bias_at, y_at, statistics_at, mean_at, variance_at,
    eps, share, devices, stride, samples, channels, pixels,
):  # fmt: skip
    """`y` gets the output, `statistics` what it was normalized with. A `share` of mean and unbiased variance goes into
    the running ones, at `mean` and `variance`, unless it is 0."""
    x, y = carray(x_at, (samples, channels, pixels)), carray(y_at, (samples, channels, pixels))
    statistics, count = carray(statistics_at, (3, channels)), samples * pixels * devices
    for channel in range(channels):
        mean, variance = 0.0, 0.0
        for device in range(devices):
            mean += parts_at[device * stride + channel] / devices
        for device in range(devices):
            off = parts_at[device * stride + channel] - mean
            variance += (parts_at[device * stride + channels + channel] + off * off) / devices
        inverse = 1.0 / np.sqrt(variance + eps)
        statistics[0, channel], statistics[1, channel], statistics[2, channel] = mean, variance, inverse
        if share > 0.0:
            mean_at[channel] += share * (mean - mean_at[channel])
            variance_at[channel] += share * (variance * count / max(1, count - 1) - variance_at[channel])
        scale, middle, shift = y.dtype.type(weight_at[channel] * inverse), y.dtype.type(mean), bias_at[channel]
        for sample in range(samples):
            row, out = x[sample, channel], y[sample, channel]
            for k in range(pixels):
                out[k] = (row[k] - middle) * scale + shift


@_compiled(4)
def own_sums(dy_at, x_at, statistics_at, found_at, samples, channels, pixels):  # type: ignore[no-untyped-def]
    """`found` (2, channels) gets the sums of dy * normalized and of dy."""
    dy, x = carray(dy_at, (samples, channels, pixels)), carray(x_at, (samples, channels, pixels))
    statistics, found = carray(statistics_at, (3, channels)), carray(found_at, (2, channels))
    for channel in range(channels):
        mean, scaled, total = statistics[0, channel], 0.0, 0.0
        for sample in range(samples):
            row, back = x[sample, channel], dy[sample, channel]
            for k in range(pixels):
                total += back[k]
                scaled += back[k] * np.float64(row[k] - mean)
        found[0, channel], found[1, channel] = scaled * statistics[2, channel], total


@_compiled(6, counts=2 + SIZES)
def differentiate(  # type: ignore[no-untyped-def]
    dy_at, x_at, parts_at, weight_at, statistics_at, dx_at, devices, stride, samples, channels, pixels
):
    """`dx` gets the gradient of the input."""
    dy, x = carray(dy_at, (samples, channels, pixels)), carray(x_at, (samples, channels, pixels))
    dx, statistics = carray(dx_at, (samples, channels, pixels)), carray(statistics_at, (3, channels))
    count = samples * pixels * devices
    for channel in range(channels):
        scaled, total = 0.0, 0.0
        for device in range(devices):
            scaled += parts_at[device * stride + channel]
            total += parts_at[device * stride + channels + channel]
        mean, inverse = statistics[0, channel], np.float64(statistics[2, channel])
        factor = weight_at[channel] * inverse
        scale, slope = dx.dtype.type(factor), dx.dtype.type(factor * inverse * scaled / count)
        shift = dx.dtype.type(factor * total / count)
        for sample in range(samples):
            row, back, out = x[sample, channel], dy[sample, channel], dx[sample, channel]
            for k in range(pixels):
                out[k] = back[k] * scale - (row[k] - mean) * slope - shift
