"""What the user is told of a plan beside its tables, in words."""

from __future__ import annotations

from harness import costs, display
from harness.planning import Draft


def replicas(draft: Draft) -> str:
    """How the batch is shared, and what the tables then show."""
    data, m, size = draft.plan.mesh.data, draft.plan.micro_batches, draft.profile.micro_batch
    return (
        f"{data} replicas of these stages, each with {m * size} of the {draft.samples} samples, in {m} "
        f"micro-batch{'es' * (m > 1)} of {size}. Below, a device stands for its likes in all replicas: "
        "the fullest one's memory, the first one's time."
    )


def prediction(draft: Draft, profile: str) -> str:
    """The prediction in one line, with where its numbers are from; `profile` says whence the profile is."""
    step_s = draft.plan.predicted["step_time_s"]
    speed = display.rate(draft.samples / step_s if step_s else None)
    told = f"predicted: {display.seconds(step_s)} a step of {draft.samples} samples, {speed}"
    times = f"layer times {draft.profile.source}" if costs.has_times(draft.profile) else "layers take no time"
    return f"{told}; {times}; profile {profile}"
