"""The loss scale of float16, which DeepSpeed finds as it continues, in the form in which a state holds it.

`good` is how many steps have ended well since the last overflow; at the last of `hysteresis` overflows it falls.
"""

from __future__ import annotations

from typing import Any


def state(optimizer: Any) -> dict[str, float] | None:
    """Return the state of DeepSpeed's loss scaler; None if the loss is not scaled."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if scaler is None or not scaler.dynamic:
        return None
    good = scaler.cur_iter - scaler.last_overflow_iter - 1
    return {"value": float(scaler.cur_scale), "good": float(good), "hysteresis": float(scaler.cur_hysteresis)}


def load(optimizer: Any, saved: dict[str, float] | None) -> None:
    """The inverse of `state`. Where nothing was saved, or no loss is scaled, all stays as it is.

    What another engine has saved knows no hysteresis.
    """
    if saved is None or state(optimizer) is None:
        return
    scaler = optimizer.loss_scaler
    scaler.cur_scale = saved["value"]
    scaler.cur_iter, scaler.last_overflow_iter = int(saved["good"]), -1
    scaler.cur_hysteresis = int(saved.get("hysteresis", scaler.delayed_shift))
