"""Whether a fix of the command helps: another search is begun with it, and simulates what it has to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from harness.checks import plan_fits, stored_profile
from harness.cli.compose import compose
from harness.core.problem import CannotRun, Fix, apply
from harness.planning.tune.result import Line

if TYPE_CHECKING:
    from harness.planning.tune.candidate_search import Tuner

TRIED = 8
"""Candidates that are simulated at most to know whether a fix helps."""


def helps(tuner: Tuner, line: Line, fix: Fix) -> bool:
    """Whether a candidate has a plan once the fix is typed; it may need too much memory."""
    settings = tuple((key, value) for key, value in line.candidate.settings if key not in fix)
    other, one = _with_fix(tuner, fix), replace(line.candidate, settings=settings)
    if other is None or settings not in other.by_settings or one.micro_batch not in tuner.grounds:
        return False
    other.grounds, other.works = tuner.grounds, tuner.works
    if other.against(one):
        return False
    judged = other.judged(Line(one))
    return judged.full or not judged.out


def _with_fix(tuner: Tuner, fix: Fix) -> Tuner | None:
    """A search with a fix of the user's overrides; None if these are refused."""
    typed = apply(tuner.overrides, fix)
    try:
        config = compose(typed)
        stored_profile.follow(config, typed)
        return type(tuner)(config, typed, tuner.folder, tuner.progress)
    except CannotRun:
        return None


def fits(tuner: Tuner, fix: Fix) -> bool:
    """Whether anything fits once the fix is typed. Profiles that are known are not made again."""
    other = _with_fix(tuner, fix)
    if other is None:
        return False
    for size, ground in tuner.grounds.items():
        own, wanted = ground.cluster, other.cluster
        device = wanted.device if plan_fits.MEMORY in fix else own.device
        cluster = replace(own, nodes=wanted.nodes, devices_per_node=wanted.devices_per_node, device=device)
        other.known[size] = replace(ground, cluster=cluster)
    other.explains = False
    try:
        return _finds_one(other)
    except CannotRun:
        return False


def _finds_one(tuner: Tuner) -> bool:
    """Whether a candidate of all devices with the smallest micro-batches fits: of those with the least memory by
    bounds, the first `TRIED` are simulated."""
    tuner.gather()
    tuner.measure(most=1)
    most_devices = tuner.blocks[0].devices
    for block in tuner.blocks:
        if block.devices == most_devices:
            tuner.open(block)
    heads = [tuner.with_state(Line(one)) for one in tuner.heads()]
    heads.sort(key=lambda line: line.closed_form_memory_bytes or 0)
    for line in heads[:TRIED]:
        if tuner.against(line.candidate):
            continue
        judged = tuner.judged(line)
        if not judged.out and not tuner.simulation(judged)[0].out:
            return True
    return False
