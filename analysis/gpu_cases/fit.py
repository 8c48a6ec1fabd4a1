"""Fit the numbers of a GPU to the half of llm-foundry's cases that is not held back.

Least mean of |log(predicted / measured)| over the cases of a GPU (Nelder-Mead). Two cards that differ only in their
memory are one GPU. Five numbers are fitted: the shares of the peak that matmuls and attention reach, of the memory's
bandwidth that other kernels reach, of a collective's time that is hidden by computing, and of the ports of a node.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.optimize import minimize

from analysis.gpu_cases import cases, predict

GPUS = {"A100": ("a100_40", "a100_80"), "H100": ("h100",)}
PORTS_GB_S = {"A100": 200.0, "H100": 400.0}
"""Eight ports of 200 or 400 Gb/s, by the data sheets of the nodes."""
KEYS = ("matmul_efficiency", "attention_efficiency", "elementwise_efficiency", "overlap", "node_bandwidth_gb_s")
START = (0.75, 0.35, 0.35, 0.6, 0.6)
EVALUATIONS = 200


def fit(gpu: str) -> dict[str, float]:
    """Returns the keys of the cluster, by the least mean error."""
    found = [case for case in cases.load() if case.gpu in GPUS[gpu] and case.is_fitted]

    def error(shares: Sequence[float]) -> float:
        if not all(0.05 <= share <= 1 for share in shares):
            return math.inf
        keys = _keys(gpu, shares)
        return statistics.mean(abs(math.log(predict.step_s(case, **keys) / case.step_s)) for case in found)

    start = [list(START)] + [[s + 0.15 * (k == j) for k, s in enumerate(START)] for j in range(len(START))]
    options = {"maxfev": EVALUATIONS, "xatol": 3e-3, "fatol": 1e-4, "initial_simplex": start}
    return _keys(gpu, minimize(error, START, method="Nelder-Mead", options=options).x)


def _keys(gpu: str, shares: Sequence[float]) -> dict[str, float]:
    *others, ports = (float(share) for share in shares)
    return dict(zip(KEYS, (*others, ports * PORTS_GB_S[gpu]), strict=True))
