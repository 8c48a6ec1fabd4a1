"""Fit the numbers of a GPU to the half of llm-foundry's cases that is not held back.

Least mean of |log(predicted / measured)| over the cases of a GPU (Nelder-Mead). Two cards that differ only in their
memory are one GPU. Five numbers are fitted: the shares of the peak that matmuls and attention reach, of the memory's
bandwidth that other kernels reach, of a collective's time that is hidden by computing, and of the ports of a node.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from scipy.optimize import minimize

from analysis.gpu_cases import cases, predict

GPUS = {"A100": ("a100_40", "a100_80"), "H100": ("h100",)}
PORTS_GB_S = {"A100": 200.0, "H100": 400.0}
"""Eight ports of 200 or 400 Gb/s, by the data sheets of the nodes."""
KEYS = ("matmul_efficiency", "attention_efficiency", "elementwise_efficiency", "overlap", "node_bandwidth_gb_s")
START = (0.75, 0.35, 0.35, 0.6, 0.6)
STEP = 0.15
"""From the start to each other point of the first simplex."""
EVALUATIONS = 200


class Measured(Protocol):
    """A published run."""

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""


M = TypeVar("M", bound=Measured)
Keys = Callable[[Sequence[float]], dict[str, float]]
"""The keys of a cluster, of the numbers that are fitted."""


def fit(gpu: str) -> dict[str, float]:
    """Returns the keys of the cluster, by the least mean error."""
    found = [case for case in cases.load() if case.gpu in GPUS[gpu] and case.is_fitted]

    def keys(shares: Sequence[float]) -> dict[str, float]:
        *others, ports = (float(share) for share in shares)
        return dict(zip(KEYS, (*others, ports * PORTS_GB_S[gpu]), strict=True))

    return of_least_error(found, predict.step_s, keys, START, EVALUATIONS)


def of_least_error(
    found: Sequence[M], step_s: Callable[..., float], keys: Keys, start: Sequence[float], evaluations: int
) -> dict[str, float]:
    """Returns the keys with which `step_s(case, **keys)` has the least mean |log(predicted / measured)|."""

    def error(shares: Sequence[float]) -> float:
        if not all(0.05 <= share <= 1 for share in shares):
            return math.inf
        of = keys(shares)
        return statistics.mean(abs(math.log(step_s(case, **of) / case.step_s)) for case in found)

    simplex = [list(start)] + [[s + STEP * (k == j) for k, s in enumerate(start)] for j in range(len(start))]
    options = {"maxfev": evaluations, "xatol": 3e-3, "fatol": 1e-4, "initial_simplex": simplex}
    return keys(minimize(error, start, method="Nelder-Mead", options=options).x)
