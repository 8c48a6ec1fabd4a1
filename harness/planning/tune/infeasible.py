"""Why no candidate fits, what fills the fullest device of the best one, and what helps: every fix was simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.checks import plan_fits
from harness.checks.plan_fits import MEMORY
from harness.config import cluster_config
from harness.config.overrides import given
from harness.core.problem import LEAVE_OUT, Fix, Problem
from harness.core.units import sizes
from harness.planning import contents
from harness.planning.memory_advice import FACTORS, offload, recompute
from harness.planning.tune import tried_fixes
from harness.planning.tune.result import Line

if TYPE_CHECKING:
    from harness.planning.tune.candidate_search import Tuner

ROOM = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""The largest multiple of the analytic estimate of memory that is tried as a limit."""
CLOSEST = 8
"""Candidates of the least estimates that are simulated, to find the one that needs least."""
NONE = "a smaller model, or devices with more memory"
MOST_FIXES = 2


def problems(tuner: Tuner, lines: Sequence[Line]) -> list[Problem]:
    """Explain why no candidate is possible."""
    full = [line for line in lines if line.full and line.needs_bytes]
    if not full:
        return impossible(tuner, lines)
    least, held = _closest(tuner, [line for line in full if line.candidate in tuner.planned] or full)
    needs_bytes, there_bytes = sum(held.values()) or least.needs_bytes or 0, least.memory_limit_bytes or 0
    needs, there = sizes(needs_bytes, there_bytes)
    one, why = least.candidate, least.problems[0].message
    if needs_bytes > there_bytes:  # of more than its state a planner may have said how much it is
        why = f"a device has {there}, {'' if held else 'at least '}{needs} are needed"
    where = f"mesh.tensor={one.mesh.tensor} mesh.pipeline={one.mesh.pipeline} mesh.data={one.mesh.data}"
    scheme = "".join(f" {key}={value}" for key, value in one.settings)
    fits_not = "the only candidate does not fit" if len(lines) == 1 else f"none of {len(lines)} candidates fits"
    message = f"{fits_not}: {why}, by {where}{scheme} with micro-batches of {one.micro_batch}"
    if parts := contents.text(held or _state(tuner, least)):
        message += f": {parts}"
    found = plan_fits.too_little_memory(message, needs_bytes, there_bytes)
    fixes = list(helpful(tuner))
    if given(tuner.overrides, MEMORY):
        fixes += _roomier(tuner, needs_bytes, there_bytes)
    return [replace(found, fixes=tuple(fixes), hint="" if fixes else NONE)]


def _closest(tuner: Tuner, lines: Sequence[Line]) -> tuple[Line, dict[str, int]]:
    """The candidate that needs least, and what fills its fullest device by a simulation, which finds more than an
    estimate; nothing for those without a plan."""
    ordered = sorted(lines, key=lambda line: line.needs_bytes or 0)
    best, parts, least = ordered[0], dict[str, int](), math.inf
    for line in ordered[:CLOSEST]:
        if line.candidate not in tuner.planned or (line.needs_bytes or 0) >= least:
            break
        if (found := tuner.held(line)) and sum(found.values()) < least:
            best, parts, least = line, found, sum(found.values())
    return best, parts


def _state(tuner: Tuner, line: Line) -> dict[str, int]:
    """What a candidate without a plan keeps in any case."""
    one = line.candidate
    scheme, ground = tuner.by_settings[one.settings], tuner.grounds[one.micro_batch]
    return contents.of_state(tuner.memory(scheme, one), ground.profile, one.mesh)


def impossible(tuner: Tuner, lines: Sequence[Line]) -> list[Problem]:
    """The problems of the candidate that is closest to a possible one.

    That is the one with the fewest problems of mesh sizes that the search chose, then the fewest problems, then the
    smallest tensor size, the most devices, the smallest micro-batch and data size: larger ones ask more of model and
    batch.
    """

    def distance(line: Line) -> tuple[int, ...]:
        one, keys = line.candidate, [problem.key for problem in line.problems]
        chosen = sum(key.startswith("mesh.") and not given(tuner.overrides, key) for key in keys)
        return chosen, len(keys), len(one.settings), one.mesh.tensor, -one.mesh.size, one.micro_batch, one.mesh.data

    if not lines:
        message = "finds no mesh that these keys and this cluster allow"
        return [Problem("mode", "tune", message, hint="fewer keys of mesh.*, another engine, or more devices")]
    closest = min(lines, key=distance)
    first, *rest = closest.problems
    if closest.no_plan:
        first = tuner.unsolved(closest.candidate) or first
    others = f"; none of the {len(lines)} candidates is possible" if len(lines) > 1 else ""
    return [replace(first, message=first.message + others), *rest]


def helpful(tuner: Tuner) -> Iterator[Fix]:
    """At most two fixes after which something fits: the first that keeps devices and batch, and the first other one."""
    found = 0
    for fixes in (_savings(tuner), _costly(tuner)):
        for fix in fixes:
            if tried_fixes.fits(tuner, fix):
                yield fix
                found += 1
                break
    if not found:
        most: Fix = {key: value for fix in _savings(tuner) for key, value in fix.items()}
        for fix in _costly(tuner) if most else ():
            if tried_fixes.fits(tuner, most | fix):
                yield most | fix
                return


def _savings(tuner: Tuner) -> Iterator[Fix]:
    """Settings that save memory and are not searched: what the user has given otherwise, offloading, then both."""
    config, overrides = tuner.config, tuner.overrides
    own: list[Fix] = [fix for fix in (recompute(config),) if fix and given(overrides, next(iter(fix)))]
    zero = config.engine.get("zero")
    if zero is not None and given(overrides, "engine.zero"):
        own += [{"engine.zero": more} for more in range(zero + 1, 4)]
    for key in ("engine.reshard_after_forward", "engine.reduce_each"):
        if given(overrides, key) and config.engine.get(key.partition(".")[2]) is False:
            own.append({key: True})
    if given(overrides, "batch.micro_batches") and not config.profile:
        own += [{"batch.micro_batches": config.batch.micro_batches * factor} for factor in FACTORS]
    if given(overrides, "batch.micro_batch_size") and config.batch.micro_batch_size > 1:
        own += [{"batch.micro_batch_size": 1}]
    own += [{key: LEAVE_OUT} for key in ("mesh.data", "mesh.pipeline", "mesh.tensor") if given(overrides, key)]
    if fix := offload(config):
        own.append(fix)
    yield from own
    both: Fix = {key: value for fix in own for key, value in fix.items()}
    if len(both) > 1:
        yield both


def _costly(tuner: Tuner) -> Iterator[Fix]:
    """A smaller batch, the largest first; where that does not help more devices."""
    config, cluster = tuner.config, tuner.cluster
    size = config.batch.size
    while not config.profile and size > 1:
        size //= 2
        yield {"batch.size": size}
    for factor in FACTORS if config.cluster.name != "local" else ():
        if cluster.nodes > 1:
            yield {"cluster.nodes": cluster.nodes * factor}
        else:
            yield {"cluster.devices": cluster.devices_per_node * factor}


def _roomier(tuner: Tuner, needs_bytes: int, there_bytes: int) -> Iterator[Fix]:
    """Memory of the devices that is enough, which the analytic estimate alone cannot say."""
    reserve = tuner.cluster.device.memory_bytes - there_bytes
    for factor in ROOM:
        enough_gb = _rounded_up((needs_bytes * factor + reserve) / cluster_config.GB)
        fix: Fix = {MEMORY: float(f"{enough_gb:g}")}
        if tried_fixes.fits(tuner, fix):
            yield fix
            return


def _rounded_up(number: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return math.ceil(number / unit) * unit
