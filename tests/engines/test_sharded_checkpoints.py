"""launch.sharded_checkpoints: each rank writes and reads its own part, by torch.distributed.checkpoint."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from engines.fsdp.engine import Config, build
from engines.pipeline.engine import Config as PipelineConfig
from engines.pipeline.engine import build as build_pipeline
from engines.sbp.engine import Config as SBPConfig
from engines.sbp.engine import build as build_sbp
from engines.torch_pipelining.engine import Config as PipeliningConfig
from engines.torch_pipelining.engine import build as build_pipelining
from harness.checks.request import request
from harness.cli.compose import compose
from harness.config import registry
from harness.core.plan import Plan
from harness.core.problem import typed
from harness.core.run_files import CHECKPOINTS, METRICS
from harness.interfaces import OptimizerSpec, Session
from harness.launch.forked_ranks import RankKilled
from harness.run import checkpoint_files
from harness.run.checkpoint_files import Unusable
from harness.worker import sharded_checkpoint
from harness.worker.checkpoints import Checkpoints, Metered, NotLoaded, When, _size_of
from models.gpt.config import Config as GPTConfig
from models.gpt.gpt import build as build_gpt
from tests import tiers
from tests.engines import networks
from tests.engines.contract import Case
from tests.engines.deepspeed.cases import case as deepspeed
from tests.engines.myelin.cases import case as myelin
from tests.engines.networks import Network
from tests.engines.test_resuming import ADAM, CASES, MOMENTUM, STEPS, flat, losses
from tests.support.full_disk import full_disk
from tests.support.sbp_plans import on_mesh, planned
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

PLAIN = OptimizerSpec("sgd", lr=0.1)
LINES = tuple(f'{{"step": {k}}}' for k in range(9))


GPT = build_gpt(GPTConfig(layers=1, hidden=32, heads=4, sequence=4, vocabulary=16, dropout=0.2))
NORMS = networks.ALL["norms"]
SHARDED: dict[str, Callable[[], Case]] = {
    name: make for name, make in CASES.items() if name.partition(",")[0] in
    ("deepspeed", "fsdp", "myelin", "pipeline", "sbp", "torch_pipelining")
} | {
    "sbp, heads": lambda: sbp(planned(GPT, 4, 8, "batch_split", alpha_s=1e-8)),
    "sbp, SUMMA": lambda: sbp(on_mesh(GPT, (2, 2), 8)),
    "deepspeed, bfloat16, ZeRO 1": lambda: replace(deepspeed("norms", 1, 2, zero=1, m=2), dtype="bfloat16"),
    "deepspeed, bfloat16, ZeRO 3": lambda: replace(deepspeed("norms", 1, 2, zero=3, m=2), dtype="bfloat16"),
    "deepspeed, bfloat16, pipelines": lambda: replace(deepspeed("norms", 2, 2, zero=1, m=2), dtype="bfloat16"),
    "deepspeed, tied": lambda: deepspeed("tied", 2, 2, zero=1, m=2),
    "deepspeed, frozen, ZeRO 3": lambda: deepspeed("shared", 1, 2, zero=3, m=2),
    "deepspeed, frozen, ZeRO 2": lambda: deepspeed("shared", 1, 2, zero=2, m=2),
}  # fmt: skip
HERE = ("fsdp", "pipeline, replicas", "myelin, 2 x 2, offload", "sbp, heads", "deepspeed, ZeRO 2", "deepspeed, ZeRO 3")
"""What is not left to soak."""
FAULTS = ("fsdp", "pipeline", "torch_pipelining", "myelin, 2 stages", "sbp, heads", "deepspeed, ZeRO 3")
"""Rank 1 writes some of them."""
ENGINES: dict[str, Callable[[], Case]] = {
    "fsdp": lambda: flat(build, Config(), 1, 2, model=NORMS),
    "pipeline": lambda: flat(build_pipeline, PipelineConfig(schedule="interleaved"), 2, model=NORMS),
    "sbp": CASES["sbp"],
    "myelin": lambda: myelin("norms", 2, 1, offload=True, bsize=100),
    "torch_pipelining": lambda: flat(build_pipelining, PipeliningConfig(schedule="1f1b"), 2, model=NORMS),
    "deepspeed": CASES["deepspeed, pipeline"],
}
"""Of one model."""
SHORT: dict[str, Callable[[], Case]] = {
    "ZeRO 1": CASES["deepspeed, ZeRO 1"],
    "ZeRO 3": CASES["deepspeed, ZeRO 3"],
    "pipeline": lambda: replace(ENGINES["pipeline"](), dtype="float32"),
}
"""In float32."""


def sbp(plan: Plan) -> Case:
    return Case(build_sbp(SBPConfig()), GPT, plan)


def case(data: int = 2, optimizer: OptimizerSpec = ADAM, name: str = "") -> Case:
    """FSDP, or the case of this name."""
    return replace(SHARDED[name]() if name else flat(build, Config(), 1, data), optimizer=optimizer)


def on_ranks(case: Case, work: Callable[[Session], Any]) -> Any:
    return run_session(case.engine, case.model, case.plan, case.spec, work)


def save(session: Session, run_dir: Path, step: int, say: Callable[[str], None] = lambda text: None) -> Checkpoints:
    checkpoints = Checkpoints(run_dir, when=When(every=1), say=say, sharded=True)
    checkpoints.after_step(session, step, 9, Metered(), LINES[:step])
    return checkpoints


def as_module(session: Any) -> None:
    """The session's layers are those of a module that has other names."""
    session.module_names = {name: f"net.{name}" for name in session.state_names}


def trained(
    run_dir: Path, steps: int = 2, prepare: Callable[[Session], None] = lambda session: None, of: Case | None = None
) -> dict[str, Any]:
    """The whole state of a session that has a checkpoint after each of its steps."""
    own = of or case()

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


@pytest.mark.parametrize("optimizer", [MOMENTUM, PLAIN], ids=["momentum", "sgd"])
def test_with_less_state(optimizer: OptimizerSpec, tmp_path: Path) -> None:
    check(case(optimizer=optimizer), tmp_path)


@pytest.mark.parametrize("name", tiers.split(SHARDED, HERE))
def test_losses_are_those_of_a_run_that_was_not_stopped(name: str, tmp_path: Path) -> None:
    check(case(name=name), tmp_path)


def check(one: Case, tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
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


@pytest.mark.parametrize("name", tiers.split(SHARDED, HERE))
def test_each_rank_writes_its_part_and_none_has_the_whole(name: str, tmp_path: Path) -> None:
    """By the names of the user's module, from which it is read again."""
    own = case(name=name)
    state = trained(tmp_path, prepare=as_module, of=own)
    folder, ranks = checkpoint_files.shards_of(tmp_path, 2), range(own.plan.mesh.size)
    assert {path.name for path in folder.iterdir()} == {".metadata", *(f"__{rank}_0.distcp" for rank in ranks)}
    main = torch.load(checkpoint_files.place(tmp_path, 2), weights_only=True)["session"]
    assert not {name for name in main["model"] if name.endswith(("weight", "bias"))}
    updated = {key for kept in state["optimizer"].values() for key in kept}  # nothing where steps were skipped
    assert {key for kept in main["optimizer"].values() for key in kept} == updated & {"step"}
    whole = as_one_file(folder, tmp_path / "whole.pt")
    found = {**whole["model"], **main["model"]}
    torch.testing.assert_close(found, {f"net.{name}": one for name, one in state["model"].items()}, rtol=0, atol=0)
    optimizer = {name: {**kept, **main["optimizer"][name]} for name, kept in whole.get("optimizer", {}).items()}
    torch.testing.assert_close(optimizer, state["optimizer"], rtol=0, atol=0)
    torch.testing.assert_close(loaded(own, tmp_path, as_module), state, rtol=0, atol=0)


def as_one_file(folder: Path, file: Path) -> dict[str, Any]:
    dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


def loaded(own: Case, run_dir: Path, prepare: Callable[[Session], None] = lambda session: None) -> dict[str, Any]:
    """The whole state of a session that goes on after two steps."""

    def work(session: Session) -> dict[str, Any]:
        prepare(session)
        Checkpoints(run_dir, 2).load(session)
        return session.state_dict()

    return on_ranks(own, work)  # type: ignore[no-any-return]


@pytest.mark.fast
def test_a_stage_is_written_by_its_rank_of_the_first_replica(tmp_path: Path) -> None:
    own = case(name="pipeline, replicas")
    state = trained(tmp_path, of=own)
    torch.testing.assert_close(loaded(own, tmp_path), state, rtol=0, atol=0)
    layers = own.model.layers()
    with (checkpoint_files.shards_of(tmp_path, 2) / sharded_checkpoint.METADATA).open("rb") as file:
        places = pickle.load(file).storage_data
    found = {(index.fqn, place.relative_path) for index, place in places.items() if index.fqn.startswith("model.")}
    stage_of = {f"{n}.": own.plan.stage_of(n) for n in range(len(layers))}
    wanted = {name: next(rank for layer, rank in stage_of.items() if name.startswith(layer))
              for name, _ in layers.named_parameters()}  # fmt: skip
    assert found == {(f"model.{name}", f"__{rank}_0.distcp") for name, rank in wanted.items()}


@pytest.mark.parametrize("first, then", [*pairwise([*ENGINES, "fsdp"])])
def test_other_engines_read_it(first: str, then: str, tmp_path: Path) -> None:
    check_moves(ENGINES[first](), ENGINES[then](), tmp_path)


@pytest.mark.parametrize("first, then", [*pairwise([*SHORT, "ZeRO 1"])])
def test_other_stages_of_zero_read_it(first: str, then: str, tmp_path: Path) -> None:
    check_moves(SHORT[first](), SHORT[then](), tmp_path)


def check_moves(first: Case, then: Case, tmp_path: Path) -> None:
    one, other = (replace(case, optimizer=ADAM) for case in (first, then))
    state = trained(tmp_path, of=one)
    torch.testing.assert_close(loaded(other, tmp_path), state, rtol=0, atol=0)


class Kinds(nn.Module):
    """Weights without a dimension, without elements, of whole numbers, that are transposed; a buffer that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.numbers = nn.Parameter(torch.arange(6), requires_grad=False)
        self.mixed = nn.Parameter(torch.randn(6, 6).t())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return (x @ self.mixed + self.numbers) * self.scale + self.none.sum()


def kinds() -> Network:
    def layers() -> list[nn.Module]:
        return [nn.Linear(6, 6), Kinds(), nn.Tanh(), nn.Linear(6, 6), Kinds(), nn.Linear(6, 3)]

    return Network("kinds", layers, lambda n: torch.randn(n, 6), lambda n: torch.randn(n, 3), networks._squares)


STAGED: dict[str, Callable[[Network], Case]] = {
    "pipeline": lambda model: flat(build_pipeline, PipelineConfig(), 2, 2, model=model),
    "torch_pipelining": lambda model: flat(build_pipelining, PipeliningConfig(), 2, 2, model=model),
    "myelin": lambda model: myelin(model, 2, 2, m=2),
}


@pytest.mark.parametrize("network", [kinds(), networks.ALL["tied"], networks.ALL["shared"]], ids=lambda one: one.name)
@pytest.mark.parametrize("engine", STAGED)
def test_weights_of_every_kind(network: Network, engine: str, tmp_path: Path) -> None:
    """Those that two stages have are written once, and read by both."""
    if engine == "myelin" and network.name == "kinds":
        network = networks.ALL["skips"]  # it refuses whole numbers
    own = replace(STAGED[engine](network), optimizer=ADAM)
    state = trained(tmp_path, of=own)
    torch.testing.assert_close(loaded(own, tmp_path), state, rtol=0, atol=0)


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
@pytest.mark.parametrize("name", tiers.split(FAULTS, ("fsdp", "pipeline")))
def test_a_rank_that_is_killed_while_it_writes(
    name: str, rank: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before is the last one, nothing else stays once the run starts again, and that resumes."""
    own, run_dir = case(name=name), tmp_path / "killed"
    straight = losses(own, tmp_path / "straight")
    step = len(losses(own, run_dir, stops=True, sharded=True))

    def deadly(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    whole = getattr(checkpoint_files, where)
    with monkeypatch.context() as patch, pytest.raises(RankKilled):
        patch.setattr(checkpoint_files, where, lambda *given: (deadly if dist.get_rank() == rank else whole)(*given))
        losses(own, run_dir, sharded=True, end=True)
    assert f"step-{STEPS}.shards" in names(run_dir) and checkpoint_files.steps(run_dir) == [step]
    checkpoint_files.tidy(run_dir, [])
    assert names(run_dir) == {f"step-{step}.pt", f"step-{step}.shards"}
    lines = checkpoint_files.read(run_dir, step).lines
    (run_dir / METRICS).write_text("".join(f"{line}\n" for line in lines))
    assert losses(own, run_dir, sharded=True, end=True) == straight
    assert names(run_dir) == {f"step-{n}{kind}" for n in (step, STEPS) for kind in (".pt", ".shards")}


def unreadable(path: Path) -> int:
    raise OSError(errno.EFBIG, "too large")


@pytest.mark.parametrize("broken", ["disk", "checksum"])
@pytest.mark.parametrize("name", tiers.split(FAULTS, ("fsdp", "pipeline")))
def test_an_error_of_one_rank_leaves_the_one_before(
    name: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = case(name=name)
    state = trained(tmp_path, 1, of=own)

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
    assert "large" in error["message"]
    main = torch.load(checkpoint_files.place(tmp_path, 3), weights_only=True)
    weights = [one for name, one in state["model"].items() if name not in main["session"]["model"]]
    in_shards = error["needed_bytes"] - _size_of(main) - sum(map(len, LINES[:2]))
    assert in_shards > sum(one.nbytes for one in weights) - 200, "what all ranks have; nothing was trained"
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
        [] if engine in {name.partition(",")[0] for name in SHARDED} else [["launch.sharded_checkpoints=false"]]
    )
