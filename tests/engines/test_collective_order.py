"""Every engine's collectives and messages, in the order in which its ranks call them, would end on NCCL.

The ranks run on gloo, but call what they would call on GPUs: a group for each channel of messages, and NCCL's own
collectives. tests/support/collective_order.py says what is checked. Steps of each are recorded, the first one included:
in it shapes are sent and groups are made. Here are more meshes and models, and up to 32 ranks; each engine has the same
check in tests/engines/test_stream_order.py, on tensors that say that they are on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engines.torch_pipelining.engine import SCHEDULES
from harness.interfaces import OptimizerSpec, Session
from harness.runtime import direct_collectives
from harness.runtime.transports.torch_transport import GroupTransport
from harness.schedule.builders.myelin import ORDERS
from harness.schedule.families import FAMILIES
from tests.engines import test_ddp, test_fsdp, test_pipeline, test_sbp, test_torch_pipelining
from tests.engines.contract import Case
from tests.engines.deepspeed import cases as deepspeed
from tests.engines.myelin import cases as myelin
from tests.support.collective_log import recorded, recording
from tests.support.collective_order import Log, faults
from tests.support.sessions import run_session

pytestmark = [pytest.mark.usefixtures("ranks", "as_on_nccl"), pytest.mark.soak, pytest.mark.short_soak]


@pytest.fixture
def as_on_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(GroupTransport, "ignores_tags", staticmethod(lambda device: True))
    monkeypatch.setattr(GroupTransport, "_announces", True)
    monkeypatch.setattr(direct_collectives, "on_gloo", lambda tensor: False)
    with recording():
        yield


def logs_of(case: Case, steps: int = 2) -> list[Log]:
    def train(session: Session) -> list[Log]:
        batch = case.model.sample(case.samples)
        return recorded(lambda: [session.step(batch) for _ in range(steps)])

    return run_session(case.engine, case.model, case.plan, case.spec, train)


def check(case: Case, steps: int = 2) -> None:
    logs = logs_of(case, steps)
    assert all(logs)
    assert faults(logs) == []


@pytest.mark.parametrize(("model", "data"), [("tied", 4), ("norms", 2), ("gpt", 4)])
def test_replicas(model: str, data: int) -> None:
    check(test_ddp.case(model, data))


@pytest.mark.parametrize("options", test_fsdp.OPTIONS.values(), ids=test_fsdp.OPTIONS.keys())
@pytest.mark.parametrize("model", ["skips", "gpt"])
def test_sharded_replicas(model: str, options: dict[str, object]) -> None:
    check(test_fsdp.case(model, 4, **options))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_stages_of_zero(zero: int) -> None:
    check(deepspeed.case("pairs", stages=1, data=4, zero=zero, m=2))


@pytest.mark.parametrize(("stages", "data", "zero"), [(4, 1, 0), (2, 2, 0), (2, 2, 1)])
def test_the_pipeline_of_deepspeed(stages: int, data: int, zero: int) -> None:
    check(deepspeed.case("tied", stages, data, zero))


@pytest.mark.parametrize(
    ("model", "devices", "micro_batches"), [("gpt", 4, 2), ("vgg", 4, 1), ("tied", 2, 2), ("amoebanet", 2, 1)]
)
def test_split_matmuls(model: str, devices: int, micro_batches: int) -> None:
    check(test_sbp.case(model, devices, micro_batches), steps=1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("model", "pipeline", "data"), [("skips", 4, 1), ("tied", 2, 2), ("gpt", 2, 2)])
def test_message_driven_pipelines(model: str, pipeline: int, data: int, order: str) -> None:
    check(myelin.case(model, pipeline, data, m=4, order=order))


@pytest.mark.parametrize("keys", [{"offload": True, "bsize": 7}, {"k": 0, "barrier": True}, {"k": 1, "bsize": 11}])
def test_ends_of_a_step(keys: dict[str, int]) -> None:
    check(myelin.case("tied", 2, 2, m=2, **keys))


@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize(("model", "devices", "data"), [("skips", 2, 1), ("gpt", 2, 2), ("tied", 3, 1)])
def test_schedules_of_pipeline(model: str, devices: int, data: int, schedule: str) -> None:
    micro_batches = 6 if devices == 3 else 8 // data  # interleaved stages want a multiple of the devices
    check(test_pipeline.case(model, schedule, devices, micro_batches=micro_batches, data=data))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("devices", "data"), [(2, 2), (4, 1)])
def test_schedules_of_torch_pipelining(devices: int, data: int, schedule: str) -> None:
    check(test_torch_pipelining.case("skips", schedule, devices, micro_batches=2 * devices, data=data))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(lambda: replace(test_ddp.case("pairs", 32, 1), samples=32), id="ddp"),
        pytest.param(lambda: replace(test_fsdp.case("pairs", 32, 1), samples=32), id="fsdp"),
        pytest.param(lambda: replace(test_pipeline.case("tied", "1f1b", 4, 4, data=8), samples=64), id="pipeline"),
        pytest.param(lambda: replace(myelin.case("tied", 4, 8, m=4), samples=64), id="myelin"),
    ],
)
def test_thirty_two_ranks(case: Callable[[], Case]) -> None:
    logs = logs_of(replace(case(), optimizer=OptimizerSpec("sgd", lr=0.01)), steps=1)
    assert len(logs) == 32
    assert faults(logs) == []
