"""Nothing in a step makes the host wait for a GPU but what is listed here, each with its reason.

A GPU runs what the host has issued. Where the host waits for a value it cannot issue the next kernels meanwhile, and
the GPU waits for these. Of a step the loss is read once, at its end.
"""

from __future__ import annotations

import ast
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.gpipe.engine import Config, build
from harness.interfaces import Session, SessionSpec
from harness.runtime.local_session import LocalSession
from harness.runtime.training_state import cast_batch
from harness.worker.prefetch import _pinned as pinned
from tests.engines import networks, test_periodic
from tests.engines.contract import Case
from tests.engines.test_resuming import flat
from tests.engines.test_stream_order import ON_RANKS
from tests.support.fake_gpus import fake_gpus
from tests.support.fake_machine import Machine
from tests.support.sessions import run_session

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engines", "harness/nn", "harness/runtime")
METHODS = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero"}
"""Of a tensor, a stream or a device: they return once it has done its work."""


def waits(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield each call that may wait: the function that it is in, and what it is."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        name = f"{inside}.{node.name}".strip(".") if named else inside  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and (what := _what(node)):
            yield name, what
        yield from waits(node, name)


def _what(call: ast.Call) -> str:
    function, keys = call.func, {key.arg for key in call.keywords}
    if isinstance(function, ast.Attribute) and function.attr in METHODS:
        return function.attr
    moves = any(ast.unparse(value).endswith("device") for value in call.args)
    if isinstance(function, ast.Attribute) and function.attr == "to" and moves and "non_blocking" not in keys:
        return "to"
    if isinstance(function, ast.Name) and function.id == "float" and not isinstance(call.args[0], ast.Constant):
        return "float"
    return ""


HOSTS_OWN = "Of the host's own: clocks, counters, tensors on the CPU."
ALLOWED = {
    "A state is saved or loaded, between steps, on the CPU.": """
        engines/deepspeed/loss_scale.py state float
        engines/deepspeed/state_dict.py State._kept float
        engines/deepspeed/state_dict.py State._masters cpu
        engines/fsdp/session.py _shard to
        engines/fsdp/session.py _whole cpu
        engines/myelin/host_optimizer.py HostOptimizer.synchronize synchronize
        harness/runtime/loss_scale.py LossScale.load float
        engines/myelin/optimizer_step.py OptimizerStep._read synchronize
        engines/delayed/delayed_stage.py DelayedStage.load_older to
        engines/delayed/delayed_stage.py DelayedStage.older_state cpu
        engines/delayed/delayed_stage.py _moved to
        engines/myelin/optimizer_step.py OptimizerStep.load synchronize
        engines/myelin/optimizer_step.py OptimizerStep.state float
        engines/sbp/sharded_state.py Shard.of to
        engines/sbp/sharded_state.py _runs tolist
        harness/runtime/training_state.py _copied cpu
        harness/runtime/training_state.py _placed to""",
    "A step begins or ends: its time, and its loss.": """
        engines/delayed/session.py DelayedSession.train_step tolist
        engines/gpipe/cuda_streams.py Recorder.__init__ synchronize
        engines/periodic/step.py Step.loss tolist
        harness/runtime/device_clock.py DeviceClock.synchronize synchronize
        harness/runtime/distributed_session.py DistributedSession.step float
        harness/runtime/distributed_session.py DistributedSession.step synchronize
        harness/runtime/local_session.py LocalSession._synchronize synchronize
        harness/runtime/local_session.py LocalSession.step float""",
    "After a step: a check, norms, and times of events that are over.": """
        harness/runtime/device_clock.py DeviceClock.seconds float
        harness/runtime/gradient_norms.py _values tolist
        harness/runtime/output_check.py raise_differences nonzero
        harness/runtime/output_check.py raise_differences tolist""",
    "Once a step, before the optimizer: whether gradients overflow, and which weights have one.": """
        harness/runtime/loss_scale.py overflows float
        engines/myelin/optimizer_step.py OptimizerStep.finish tolist""",
    "Once a run: the form of a message, an index of blocks, places to compare.": """
        engines/sbp/sharded_layers.py mine to
        engines/sbp/stage_p2p.py StageP2P._hear tolist
        harness/runtime/output_check.py _places to
        harness/runtime/transports/transport.py _form tolist""",
    HOSTS_OWN: """
        engines/myelin/optimizers.py Optimizer._step float
        harness/runtime/host_clocks.py _asked float
        harness/runtime/host_clocks.py compare tolist
        harness/nn/batchnorm.py DeferredBatchNorm._use tolist
        harness/runtime/output_check.py compare item
        harness/runtime/transports/mpi_transport.py _bytes numpy""",
    "The thread has nothing else to issue: it waits for what its queue or its channel has given the GPU.": """
        engines/periodic/device_queues.py _on_streams synchronize
        harness/runtime/transports/torch_transport.py GroupTransport._synchronize synchronize""",
    "Modules are moved before the first step.": """
        harness/nn/tied.py moved to""",
    "A cumulative average (momentum=None), which no model here has.": """
        harness/nn/batchnorm.py DeferredBatchNorm._commit float
        engines/sbp/sharded_layers.py BatchNorm._running float""",
}


def found() -> set[str]:
    return {
        f"{path.relative_to(ROOT)} {name} {what}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name, what in waits(ast.parse(path.read_text()))
    }


def test_steps_wait_for_nothing_else() -> None:
    listed = [line.strip() for lines in ALLOWED.values() for line in lines.strip().splitlines()]
    assert len(listed) == len(set(listed))
    assert sorted(found() - set(listed)) == [], "the host waits for the device"
    assert sorted(set(listed) - found()) == [], "is not there any more"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("loss.item()", "item"), ("float(loss.detach())", "float"), ("x.to(self.device)", "to"),
        ("x.to(device, torch.float32)", "to"), ("mask.nonzero()", "nonzero"), ("stream.synchronize()", "synchronize"),
        ("x.to(self.device, non_blocking=True)", ""), ("x.to(x.dtype)", ""), ("float('inf')", ""), ("x.detach()", ""),
    ],
)  # fmt: skip
def test_what_waits(code: str, what: str) -> None:
    found = list(waits(ast.parse(f"class Session:\n    def step(self):\n        {code}")))
    assert found == ([("Session.step", what)] if what else [])


@contextmanager
def noted(waited: set[str]) -> Iterator[None]:
    """Within it, each wait of the host for a fake GPU is noted, by where this project's code is then."""
    plain = Machine.host_waits

    def wait(machine: Machine, stream: str) -> None:
        files = ((Path(frame.filename), frame.name) for frame in reversed(traceback.extract_stack()))
        own = ((file.relative_to(ROOT), name) for file, name in files if file.is_relative_to(ROOT))
        waited.add(next(f"{file} {name}" for file, name in own if file.parts[0] in ("engines", "harness")))
        plain(machine, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "host_waits", wait)
        yield


def waits_of(case: Case) -> set[str]:
    """The functions in which the third step of a session waits for GPUs, in any rank."""
    count = max(case.plan.mesh.size, *(device + 1 for device in case.plan.devices))
    spec = replace(case.spec, devices=tuple(f"cuda:{number}" for number in range(count)))

    def train(session: Session) -> set[str]:
        batch, waited = pinned(case.model.sample(case.samples)), set[str]()
        for _ in range(2):  # what waits once in a run: forms of messages
            session.step(batch)
        with noted(waited):
            session.step(batch)
        every: list[Any] = [waited]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()
            dist.all_gather_object(every, waited)
        return set().union(*every)

    with fake_gpus():
        return run_session(case.engine, case.model, case.plan, spec, train)


def local(**keys: Any) -> Case:
    return flat(build, Config(**keys), 2, model=networks.ALL["norms"])


SESSIONS: dict[str, Callable[[], Case]] = {
    "single": lambda: local().reference,
    "gpipe": local,
    "gpipe, deferred batch norm": lambda: local(deferred_batch_norm=True),
    "gpipe, recomputed": lambda: replace(local(), plan=replace(local().plan, recompute="always")),
    "periodic": lambda: test_periodic.case("pairs", 2, 4),
    **{
        name: ON_RANKS[name]
        for name in ("myelin message_driven, replicas", "pipeline zbv", "pipeline, replicas", "sbp")
    },
}


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", SESSIONS)
def test_a_step_on_fake_gpus_waits_nowhere_else(name: str) -> None:
    """Also where no call says so: a tensor that is a condition, a copy from memory that is not pinned."""
    unnamed = {"harness/nn/shared_state.py _changed"}  # after a step: what stages share is compared
    waiting = (lines for why, lines in ALLOWED.items() if why != HOSTS_OWN)
    places = (line.split() for lines in waiting for line in lines.strip().splitlines())
    listed = {f"{file} {function.rpartition('.')[2]}" for file, function, _ in places}
    waited = waits_of(SESSIONS[name]())
    assert waited and waited <= listed | unnamed


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_on_a_gpu_waits_for_nothing(stages: int) -> None:
    """As CUDA's own check sees it: of `single`, and of a pipeline whose stages share a GPU."""
    case = flat(build, Config(), stages, mode="always", model=networks.ALL["norms"])
    case = case.reference if stages == 1 else case
    spec = SessionSpec(("cuda:0",) * stages, case.optimizer)
    batch = cast_batch(case.model.sample(case.samples), spec.dtype)

    def train(session: Session) -> list[str]:
        assert isinstance(session, LocalSession)
        for _ in range(2):  # what waits once in a run: copies of buffers are compared
            session.step(batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                session.train_step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waited = (one for one in caught if "synchroniz" in str(one.message))
        return [f"{one.filename}:{one.lineno}: {one.message}" for one in waited]

    assert run_session(case.engine, case.model, case.plan, spec, train) == []
