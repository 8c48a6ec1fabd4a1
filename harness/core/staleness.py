"""Asynchronous pipelines: with which weights a micro-batch computes, and what corrects the delay of its gradient.

Stage j of P has P - j micro-batches in flight. It updates its weights after each group of `update_every` micro-batches,
while others are under way. W2 are its weights after two updates; here P = 3, j = 0 and update_every = 1:

    tasks      0F0   0F1   0F2   0B0   0F3   0B1   0F4   0B2   0F5   0B3
    updates                         W1          W2          W3          W4
    stash      W0    W0    W0    W0    W1    W0    W2    W0    W3    W1      forward and backward the same weights
    none       W0    W0    W0    W0    W1    W1    W2    W2    W3    W3      backward with the newest

`engine.versions`, with what a micro-batch of group g computes, the delay of its gradient and the copies of the weights:

    flush  the weights after g updates                        0, the pipeline drains before an update      1
    2bw    the weights after g - 1 updates                    1 on each stage                              2
    stash  the newest ones when its forward task begins       P - 1 - j for update_every=1                 P - j
    none   the newest ones, in each of its two tasks          as stash                                     1

flush: GPipe, arXiv 1811.06965. 2bw: PipeDream-2BW, arXiv 2006.09503, section 3.1. stash: PipeDream, SOSP 2019,
section 3.3. none: PipeMare, arXiv 1910.05124, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.model_profile import ModelProfile
from harness.core.problem import Problem, spelled
from harness.core.value_checks import at_least, one_of

VERSIONS = ("flush", "2bw", "stash", "none")
PAPERS = {
    **dict.fromkeys(("gpipe", "1f1b", "pipedreamflush", "sync", "synchronous"), "flush"),
    **{"pipedream2bw": "2bw", "pipedream": "stash", "pipemare": "none", "nostash": "none"},
}
"""What papers call them, without signs."""


@dataclass
class Corrections:
    """What makes up for the delay of gradients. All compose with every optimizer, and with each other; but where both
    tasks predict weights of one time there is no discrepancy between them.

    u is the optimizer's last update of the weights W, s the delay of a gradient in updates.
    """

    prediction: bool = False
    """Micro-batches compute with predicted weights, W + s u: those that their gradient will find if s more updates are
    as the last one. For SGD with momentum that is SpecTrain's formula W - s lr v (arXiv 1809.02839, section 3.2), for
    Adam its own step s times (XPipe, arXiv 1911.04610)."""
    round_trip: bool = False
    """With engine.corrections.prediction=true: all stages predict the weights of one time, when the micro-batch ends
    its backward task in the first stage, SpecTrain's whole way (section 3.3; `Delay.end`)."""
    error_feedback: bool = False
    """An update also makes up for the s updates that were made with older gradients: u + s (u - the one before). With
    s = 1 that is 2 u(t) - u(t-1), the error feedback of arXiv 2606.30634 as its abstract describes it."""
    look_ahead: float = 0.0
    """Nesterov's look-ahead for late gradients, with any optimizer: the update is u + look_ahead (u - the one before),
    and W is the point ahead, where gradients are computed. With SGD and its own momentum for look_ahead that is torch's
    nesterov=True. arXiv 2505.01099 has 0.99, with NAdam, which looks ahead by itself."""
    discrepancy: float = 0.0
    """D of PipeMare's discrepancy correction (arXiv 1910.05124, section 3.2: T2) with engine.versions=none, 0.135 in
    the paper; 0: none. A backward task that finds weights tau updates newer than those of its forward task computes
    with W - tau delta, where delta(t+1) = gamma delta(t) + (1 - gamma) (W(t+1) - W(t)) and gamma = D ** (1 / tau) with
    the tau of that update; where tau is 0 so is gamma."""
    lr_steps: int = 0
    """The learning rate is divided by s ** (1 - t / lr_steps) in update t, for the first lr_steps updates (PipeMare,
    arXiv 1910.05124, section 3.1: T1); 0: never."""

    @property
    def keeps_update(self) -> bool:
        """Whether the last update is kept."""
        return self.prediction or self.error_feedback or self.look_ahead > 0

    @property
    def kept(self) -> int:
        """How often the memory of the weights the optimizer keeps more: the last update, the mean change."""
        return self.keeps_update + (self.discrepancy > 0)

    @property
    def apart(self) -> bool:
        """Whether micro-batches compute with weights that no update has made, so that the newest are kept apart."""
        return self.prediction or self.discrepancy > 0

    def ahead(self, one: Delay) -> tuple[int, int]:
        """How many updates further the weights of the forward and of the backward task are moved."""
        if self.prediction:
            target = one.end if self.round_trip else one.group
            return target - one.forward, target - one.backward
        return 0, one.forward - one.backward if self.discrepancy else 0

    def gamma(self, delay: int) -> float:
        """How much of the mean change of the weights stays in an update with gradients `delay` updates old."""
        return float(self.discrepancy ** (1 / delay)) if delay else 0.0

    def repeated(self, delay: int) -> float:
        """How much of the change from update to update is added once more, with gradients `delay` updates old."""
        return self.look_ahead + delay * self.error_feedback if delay else 0.0

    def lr_factor(self, delay: int, number: int) -> float:
        """The factor of the learning rate of update `number`, counted from 0, with gradients `delay` updates old."""
        left = max(0.0, 1 - number / self.lr_steps) if self.lr_steps else 0.0
        return float(max(1, delay) ** -left)


def check(versions: str, default: str, corrections: Corrections) -> list[Problem]:
    """Values of `engine.versions` and `engine.corrections` that no run can have."""
    meant = PAPERS.get("".join(letter for letter in versions.lower() if letter.isalnum()), default)
    found = [*one_of("engine.versions", versions, VERSIONS, meant)]
    found += at_least("engine.corrections.lr_steps", corrections.lr_steps, 0)
    if corrections.round_trip and not corrections.prediction:
        key, message = "engine.corrections.round_trip", "says how far weights are predicted, and none are"
        found.append(Problem(key, True, message, ({"engine.corrections.prediction": True}, {key: False})))
    key, ahead = "engine.corrections.look_ahead", corrections.look_ahead
    if not 0 <= ahead < 1:
        found.append(Problem(key, ahead, "must be at least 0 and below 1, as a momentum", ({key: 0.99},)))
    return [*found, *_discrepancy(versions, corrections)]


def _discrepancy(versions: str, corrections: Corrections) -> list[Problem]:
    """A correction of backward weights that are those of the forward task, or of the same time."""
    key, value = "engine.corrections.discrepancy", corrections.discrepancy
    if not 0 <= value < 1:
        return [Problem(key, value, "must be at least 0 and below 1", ({key: 0.135},))]
    if value and versions in VERSIONS[:-1]:
        message = f"corrects weights that change from forward to backward task, with engine.versions={versions} none do"
        return [Problem(key, value, message, ({"engine.versions": "none"}, {key: 0.0}))]
    if value and corrections.prediction:
        message = "has nothing to correct: with engine.corrections.prediction=true forward and backward task predict "
        message += "weights of the same time"
        return [Problem(key, value, message, ({"engine.corrections.prediction": False}, {key: 0.0}))]
    return []


@dataclass(frozen=True)
class Delay:
    """The weights of one stage with which a micro-batch computes, each as the number of updates that made them.

    Its gradient goes into update number `group`, which finds the weights after `group` updates. When the micro-batch
    ends its way, in the first stage, there have been `end` updates of this stage; its own does not count.
    """

    group: int
    forward: int
    backward: int
    end: int

    @property
    def updates(self) -> int:
        """How many updates its gradient is late."""
        return self.group - self.forward


def delay(
    versions: str, group: int, before_forward: int, before_backward: int, first: int = 0, end: int | None = None
) -> Delay:
    """The weights of a micro-batch of `group`, whose tasks begin after so many updates of the stage. `first` is the
    number of updates after which the pipeline was last empty; `end` by default `group`."""
    end = group if end is None else max(group, end)
    if versions == "flush":
        return Delay(group, group, group, group)
    if versions == "2bw":
        used = max(group - 1, first)
        return Delay(group, used, used, end)
    return Delay(group, before_forward, before_backward if versions == "none" else before_forward, end)


def ended(micro_batch: int, way_back: int, every: int, of: int | None = None) -> int:
    """Updates of a stage, that of the micro-batch itself not counted, when this ends its way: by then the stage has
    begun `way_back` more backward tasks. Of a pipeline that drains after `of` micro-batches; None: never.

    SpecTrain counts s = floor(k / 2) + N - k - 1 updates from the forward task in stage k of N to that time, and
    floor(k / 2) from the backward task (arXiv 1809.02839, section 3.3). That is this number for one micro-batch an
    update and tasks of equal length, where way_back is floor(k / 2). The paper counts no update by the micro-batch
    itself, though all stages but the first have made it before the way ends; nor is it counted here."""
    done = micro_batch + 1 + way_back
    return (done // every if of is None or done < of else math.ceil(of / every)) - 1


def ways_back(in_flight: Sequence[int]) -> list[int]:
    """Backward tasks that each stage begins while a micro-batch goes on from its own to that of the first stage, where
    forward and backward tasks take equally long: half of what it has fewer in flight, the other half is the way to
    it."""
    return [max(0, in_flight[0] - own) // 2 for own in in_flight]


def late(versions: str, in_flight: int, every: int) -> int:
    """How many updates late the oldest gradient of a stage is, once the pipeline is full."""
    return {"flush": 0, "2bw": 1}.get(versions, math.ceil((in_flight - 1) / every))


UNTIED = "weights of its own for each layer, as model.tied=false of model=gpt"


def copies(versions: str, in_flight: int, every: int, corrections: Corrections) -> int:
    """Copies of the weights of a stage with so many micro-batches in flight: its versions, and the newest if
    micro-batches compute with others made from them."""
    kept = 1 + (late(versions, in_flight, every) if versions in ("2bw", "stash") else 0)
    return kept + corrections.apart


def described(late: Sequence[int]) -> str:
    """How late the gradients of each stage are: "one update old", "[2,1,0] updates old, stage by stage"."""
    if len(set(late)) > 1:
        return f"{spelled(list(late))} updates old, stage by stage"
    return "one update old" if late[0] == 1 else f"{late[0]} updates old"


def cast(versions: str, profile: ModelProfile) -> list[Problem]:
    """Autocast keeps a copy of the weights from the forward to the backward task, which then are not the newest."""
    if versions != "none" or not profile.autocast:
        return []
    message = "needs the newest weights in a backward task, precision.autocast keeps those of the forward task"
    return [Problem("engine.versions", versions, message, ({"engine.versions": "stash"}, {"precision": "fp32"}))]


def of_group(delays: Sequence[Delay]) -> int:
    """How late the oldest gradient of a group is."""
    return max(one.updates for one in delays)
