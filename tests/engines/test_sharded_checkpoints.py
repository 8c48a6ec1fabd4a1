"""launch.sharded_checkpoints: each rank writes and reads its own part, by torch.distributed.checkpoint."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from engines.fsdp.engine import Config, build
from harness.checks.request import request
from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import typed
from harness.core.run_files import CHECKPOINTS, METRICS
from harness.interfaces import OptimizerSpec, Session
from harness.launch.forked_ranks import RankKilled
from harness.run import checkpoint_files
from harness.run.checkpoint_files import Unusable
from harness.worker import sharded_checkpoint
from harness.worker.checkpoints import Checkpoints, Metered, NotLoaded, When
from tests.engines.contract import Case
from tests.engines.test_resuming import ADAM, MOMENTUM, STEPS, flat, losses
from tests.support.full_disk import full_disk
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

PLAIN = OptimizerSpec("sgd", lr=0.1)
LINES = tuple(f'{{"step": {k}}}' for k in range(9))


def case(data: int = 2, optimizer: OptimizerSpec = ADAM) -> Case:
    return replace(flat(build, Config(), 1, data), optimizer=optimizer)


def on_ranks(case: Case, work: Callable[[Session], Any]) -> Any:
    return run_session(case.engine, case.model, case.plan, case.spec, work)


def save(session: Session, run_dir: Path, step: int, say: Callable[[str], None] = lambda text: None) -> Checkpoints:
    checkpoints = Checkpoints(run_dir, when=When(every=1), say=say, sharded=True)
    checkpoints.after_step(session, step, 9, Metered(), LINES[:step])
    return checkpoints


def as_module(session: Any) -> None:
    """The session's layers are those of a module that has other names."""
    session.module_names = {name: f"net.{name}" for name in session.state_names}


def trained(run_dir: Path, steps: int = 2, prepare: Callable[[Session], None] = lambda session: None) -> dict[str, Any]:
    """The whole state of a session that has a checkpoint after each of its steps."""
    own = case()

    def work(session: Session) -> dict[str, Any]:
        prepare(session)
        torch.manual_seed(3)
        batch = own.model.sample(own.samples)
        for step in range(steps):
            session.step(batch)
            save(session, run_dir, step + 1)
        return session.state_dict()

    return on_ranks(own, work)  # type: ignore[no-any-return]


def names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / CHECKPOINTS).iterdir()}


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM, PLAIN], ids=["adamw", "momentum", "sgd"])
def test_losses_are_those_of_a_run_that_was_not_stopped(optimizer: OptimizerSpec, tmp_path: Path) -> None:
    one, run_dir = case(optimizer=optimizer), tmp_path / "stopped"
    straight = losses(one, tmp_path / "straight")
    stopped = losses(one, run_dir, stops=True, sharded=True)
    step = len(stopped)
    assert 0 < step < STEPS and stopped == straight[:step]
    assert names(run_dir) == {f"step-{step}.pt", f"step-{step}.shards"}
    assert losses(one, run_dir) == straight, "the checkpoint says how it is read, not the key"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_reads_the_state(ranks: int, tmp_path: Path) -> None:
    """Weights, moments, counters and the mean of the replicas' statistics; layers have 8 and 3 rows for 3 ranks."""
    expected, said = trained(tmp_path), tmp_path / "said"

    def work(session: Session) -> dict[str, Any]:
        Checkpoints(tmp_path, 2, say=said.write_text).load(session)
        return session.state_dict()

    found = on_ranks(case(ranks), work)
    for state in (found, expected):  # which three ranks average again
        state["model"] = {name: one for name, one in state["model"].items() if "running" not in name or ranks != 3}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert ("generators start again" in said.read_text()) == (ranks != 2)


def test_each_rank_writes_its_part_and_none_has_the_whole(tmp_path: Path) -> None:
    """By the names of the user's module, from which it is read again."""
    state = trained(tmp_path, prepare=as_module)
    folder = checkpoint_files.shards_of(tmp_path, 2)
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    main = torch.load(checkpoint_files.place(tmp_path, 2), weights_only=True)["session"]
    assert not {name for name in main["model"] if name.endswith(("weight", "bias"))}
    assert {key for state in main["optimizer"].values() for key in state} == {"step"}
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    found = {**whole["model"], **main["model"]}
    torch.testing.assert_close(found, {f"net.{name}": one for name, one in state["model"].items()}, rtol=0, atol=0)

    def work(session: Session) -> dict[str, Any]:
        as_module(session)
        Checkpoints(tmp_path, 2).load(session)
        return session.state_dict()

    torch.testing.assert_close(on_ranks(case(), work), state, rtol=0, atol=0)


def test_the_last_two_are_kept_and_a_damaged_one_is_out_of_the_way(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    assert names(tmp_path) == {"step-2.pt", "step-2.shards", "step-3.pt", "step-3.shards"}
    assert [checkpoint_files.read(tmp_path, step).step for step in (2, 3)] == [2, 3]
    flipped(checkpoint_files.shards_of(tmp_path, 3) / "__1_0.distcp")
    with pytest.raises(Unusable, match=r"is damaged in .*__1_0\.distcp"):
        checkpoint_files.read(tmp_path, 3)
    (checkpoint_files.shards_of(tmp_path, 2) / ".metadata").unlink()
    with pytest.raises(Unusable, match="cannot be read"):
        checkpoint_files.read(tmp_path, 2)
    checkpoint_files.tidy(tmp_path, [3])
    assert names(tmp_path) == {"step-2.pt", "step-2.shards", "step-3.damaged", "step-3.damaged_shards"}
    checkpoint_files.remove_all(tmp_path)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("rank, where", [(1, "recording"), (0, "write")], ids=["shard", "file"])
def test_a_rank_that_is_killed_while_it_writes(
    rank: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before is the last one, nothing else stays once the run starts again, and that resumes."""
    straight, run_dir = losses(case(), tmp_path / "straight"), tmp_path / "killed"
    step = len(losses(case(), run_dir, stops=True, sharded=True))

    def deadly(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    whole = getattr(checkpoint_files, where)
    with monkeypatch.context() as patch, pytest.raises(RankKilled):
        patch.setattr(checkpoint_files, where, lambda *given: (deadly if dist.get_rank() == rank else whole)(*given))
        losses(case(), run_dir, sharded=True, end=True)
    assert f"step-{STEPS}.shards" in names(run_dir) and checkpoint_files.steps(run_dir) == [step]
    checkpoint_files.tidy(run_dir, [])
    assert names(run_dir) == {f"step-{step}.pt", f"step-{step}.shards"}
    lines = checkpoint_files.read(run_dir, step).lines
    (run_dir / METRICS).write_text("".join(f"{line}\n" for line in lines))
    assert losses(case(), run_dir, sharded=True, end=True) == straight
    assert names(run_dir) == {f"step-{n}{kind}" for n in (step, STEPS) for kind in (".pt", ".shards")}


def unreadable(path: Path) -> int:
    raise OSError(errno.EFBIG, "too large")


@pytest.mark.parametrize("broken", ["disk", "checksum"])
def test_an_error_of_one_rank_leaves_the_one_before(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 1)
    own = case()

    def work(session: Session) -> tuple[list[str], Any]:
        said: list[str] = []
        breaks = dist.get_rank() == 1
        with monkeypatch.context() as patch, full_disk(900 if breaks and broken == "disk" else 1 << 30):
            if breaks and broken == "checksum":
                patch.setattr(checkpoint_files, "checksum", unreadable)
            error = save(session, tmp_path, 2, said.append).error
        save(session, tmp_path, 3)
        return said, error

    said, error = on_ranks(own, work)
    assert len(said) == 1 and said[0].startswith("no checkpoint after 2 steps, older ones stay: ")
    assert error["needed_bytes"] > 1000 and "large" in error["message"]
    assert names(tmp_path) == {"step-1.pt", "step-1.shards", "step-3.pt", "step-3.shards"}


class Evil:
    """What a pickle can do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 7",)


def test_metadata_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    (checkpoint_files.shards_of(tmp_path, 1) / sharded_checkpoint.METADATA).write_bytes(pickle.dumps(Evil()))

    def work(session: Session) -> str:
        with pytest.raises(NotLoaded) as caught:
            Checkpoints(tmp_path, 1).load(session)
        return str(caught.value)

    assert "holds more than weights" in on_ranks(case(), work)


@pytest.mark.parametrize("engine", sorted({plugin.name for plugin in registry.scan() if plugin.group == "engine"}))
def test_where_it_is_refused(engine: str) -> None:
    config = compose([f"engine={engine}", "model=unet", "launch.sharded_checkpoints=true"])
    found = [one for one in request(config, registry.build("engine", config.engine).capabilities, None)
             if one.key == "launch.sharded_checkpoints"]  # fmt: skip
    assert [[typed(fix) for fix in one.fixes] for one in found] == (
        [] if engine == "fsdp" else [["launch.sharded_checkpoints=false"]]
    )
