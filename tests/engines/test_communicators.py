"""All communicators are opened by `harness.runtime.collectives.new_group`, which says so; also those of libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh

from harness.interfaces import Session
from harness.runtime import collectives
from tests.engines import test_ddp, test_fsdp, test_sbp, test_torch_pipelining
from tests.engines.contract import Case
from tests.engines.deepspeed import cases as deepspeed
from tests.engines.myelin import cases as myelin
from tests.support.sessions import run_session

CASES: dict[str, Callable[[], Case]] = {
    "deepspeed": lambda: deepspeed.case("pairs", 1, 2, 3, m=2),
    "deepspeed, stages": lambda: deepspeed.case("tied", 2, 2, 1),
    "fsdp": lambda: test_fsdp.case("pairs"),
    "ddp": lambda: test_ddp.case("pairs"),
    "myelin": lambda: myelin.case("tied", 2, 2),
    "sbp": lambda: test_sbp.case("gpt", 4, 2),
    "torch_pipelining": lambda: test_torch_pipelining.case("tied", "1f1b", data=2),
}
NO_OWN = {"fsdp", "ddp"}
"""Engines that use the group in which the ranks have met, alone."""


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", CASES)
def test_who_opens_communicators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, callers = CASES[name](), list[str]()

    def watched(opened: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            callers.append(sys._getframe(1).f_code.co_filename)
            return opened(*args, **kwargs)

        return call

    for module, function in (dist, "new_group"), (dist, "split_group"), (device_mesh, "new_group"):
        monkeypatch.setattr(module, function, watched(getattr(module, function)))

    def train(session: Session) -> list[str]:
        session.step(case.model.sample(case.samples))
        return callers

    found = run_session(case.engine, case.model, case.plan, case.spec, train)
    assert {Path(one) for one in found} == (set() if name in NO_OWN else {Path(collectives.__file__)})
