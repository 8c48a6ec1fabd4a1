"""`harness.race`, `plan` and `simulate`: one call with a module and a batch returns records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import Classifier, plan, race, simulate
from harness.config import registry
from harness.core.plan import Plan
from harness.core.problem import CannotRun
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, RACE
from harness.core.trace import Trace
from harness.sweep import local
from tests.harness.user_model import nets
from tests.support import known_machine

BATCH = torch.randn(12, 4), torch.arange(12) % 3
QUICK: dict[str, Any] = {"costs": "analytic", "cluster": "p40x8", "cluster.devices": 2, "batch.micro_batches": 4}

SCRIPT = """
import json
import torch
from torch import nn
from torch.nn import functional
from harness import plan, race, simulate

RATE = 0.5

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)])
    def forward(self, x):
        for layer in self.layers:
            x = scaled(layer(x))
        return x

def scaled(x):
    return torch.tanh(x) / RATE

def loss(output, targets):
    return RATE * functional.cross_entropy(output, targets, reduction="none")

torch.manual_seed(1)
net = Net()
weights = {name: value.clone() for name, value in net.state_dict().items()}
batch = torch.randn(8, 4), torch.randint(3, (8,))
keys = dict(engine=["single", "gpipe"], mesh={"pipeline": 2}, batch={"micro_batches": 4}, steps=2, warmup=1,
            optimizer={"lr": 0.5}, precision="fp64", tracker="none", cluster={"devices": 2}, out="runs/raced")
raced = race(net, batch, "launch.checkpoint_every=1", loss=loss, **keys)
again = race(net, batch, "launch.checkpoint_every=1", loss=loss, **keys)
assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())

losses = []
exact = net.double()
optimizer = torch.optim.SGD(exact.parameters(), lr=0.5)
for _ in range(3):
    optimizer.zero_grad()
    mean = loss(exact(batch[0].double()), batch[1]).mean()
    mean.backward()
    optimizer.step()
    losses.append(mean.item())
print(json.dumps({"losses": losses, "raced": [one.to_json() for one in raced], "again": again == raced}))
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with known_machine.known(tmp_path_factory):
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def refused(*arguments: Any, **keys: Any) -> str:
    with pytest.raises(CannotRun) as raised:
        plan(*arguments, **keys)
    return str(raised.value)


def losses(record: RunRecord) -> list[float]:
    lines = (Path(record.config["out"]) / METRICS).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.usefixtures("at_length")
def test_a_script_without_a_main_guard_races_a_class_of_its_own(tmp_path: Path, ranks: None) -> None:
    """Its weights are where each engine begins, and stay as they are; what is done is not run again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run: Any = {"capture_output": True, "text": True, "check": False, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "script.py"], env={"PYTHONPATH": str(registry.ROOT)}, **run)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = json.loads(done.stdout)
    records = [RunRecord.from_json(one) for one in found["raced"]]
    assert [(one.status, one.config["engine"]["name"]) for one in records if one.config] == [
        ("infeasible", "single"),
        ("ok", "gpipe"),
    ]
    assert found["again"] and records[0].problems[0].key == "mesh.pipeline"
    assert losses(records[1]) == pytest.approx(found["losses"], rel=1e-9)


def test_a_plan_is_a_record(here: Path, commands: None, fork_server: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed; an engine that cannot is a record, too."""
    records = plan(module(), BATCH, engine=["gpipe", "ddp"], mesh={"pipeline": 2}, **QUICK)
    assert capfd.readouterr() == ("", "")
    first, other = records
    assert first.status == "ok" and Plan.from_json(first.plan or {}).mesh.pipeline == 2
    assert first.predicted["step_time_s"] > 0 and first.config["batch"]["size"] == 12
    assert first.config["model"]["name"] == "Sequential.py:build"
    assert other.status == "infeasible" and other.problems[0].key == "mesh.pipeline"


def test_a_simulated_step_has_figures_and_a_trace(here: Path, commands: None, fork_server: None) -> None:
    (one,) = simulate(Classifier(module(), (4,), 3), "batch.size=16", engine="gpipe", out="runs/mine", **QUICK)
    assert (one.status, one.source) == ("ok", "simulated") and one.metrics["throughput"] > 0
    assert len(Trace.load(Path(one.config["out"]) / str(one.trace)).spans) > 8
    assert Path(one.config["out"]).parent == here / "runs/mine"


def test_models_by_name_and_the_table_where_it_is_asked_for(
    here: Path, commands: None, fork_server: None, capfd: pytest.CaptureFixture[str]
) -> None:
    nets.write(here, nets.WRAPPED)
    records = plan("net.py:build,mlp", engine="single", show=True, **(QUICK | {"cluster.devices": 1}))
    assert [(one.status, one.config["model"]["name"]) for one in records] == [("ok", "net.py:build"), ("ok", "mlp")]
    assert "2 points: 2 ok" in capfd.readouterr().out


def test_a_module_without_values_is_planned_alone(here: Path, commands: None, fork_server: None) -> None:
    with torch.device("meta"):
        large, inputs = nn.Sequential(*(nn.Linear(1 << 14, 1 << 14) for _ in range(4))), torch.empty(16, 1 << 14)
    (one,) = plan(large, (inputs, torch.zeros(16, 1 << 14, device="meta")), engine="gpipe", **QUICK)
    assert (one.status, one.plan and one.plan["mesh"]["pipeline"]) == ("ok", 2)
    with pytest.raises(CannotRun, match="has weights on the meta device, without values"):
        race(large, (inputs, inputs), engine="gpipe")


def test_an_output_that_the_targets_do_not_fit(here: Path, commands: None, fork_server: None) -> None:
    (one,) = plan(module(), (BATCH[0], BATCH[1] + 2), engine="gpipe", **QUICK)
    assert one.status == "infeasible"
    assert "targets of 0 to 4 need an output of (3, 5 or more), it is (3, 3)" in one.reason


def test_problems_of_typing_come_all_at_once(here: Path) -> None:
    with pytest.raises(CannotRun) as raised:
        race(module(), BATCH, "launch.timeout=3", engine="gpip", mesh={"pipelin": 2}, batch={"size": "x"})
    keys = [problem.key for problem in raised.value.problems]
    assert sorted(keys) == ["batch.size", "engine", "launch.timeout", "mesh.pipelin"]
    assert "mode plan   is the name of the function" in refused("mlp", mode="plan")
    assert "model gpt   is the first argument" in refused("mlp", "model=gpt")
    assert "batch   is given, and mlp has samples and a loss of its own" in refused("mlp", BATCH)
    assert "does not exist" in refused("nothing.py:build")


def test_engines_that_train_in_turns(here: Path, ranks: None, capfd: pytest.CaptureFixture[str]) -> None:
    keys: dict[str, Any] = {
        "tracker": "none",
        "cluster": {"device": "cpu", "devices": 2},
        "warmup": 1,
        "steps": 2,
        "batch": {"micro_batches": 4},
    }
    with pytest.raises(CannotRun, match="is no race: it takes two"):
        race(module(), BATCH, turns=True, engine="single", **keys)
    engines = ["single", "gpipe", "periodic"]
    records = race(module(), BATCH, "periodic:mesh.pipeline=7", turns=True, engine=engines, out="runs/it", **keys)
    assert capfd.readouterr() == ("", "")
    assert [one.status for one in records] == ["ok", "ok", "infeasible"]
    assert Path(records[0].config["out"]).is_absolute()
    found = json.loads((here / "runs/it" / RACE).read_text())
    assert [len(one["rounds_s"]) for one in found["entries"]] == [2, 2, 0]
    assert losses(records[0]) == pytest.approx(losses(records[1]), rel=1e-5)


def test_an_interrupted_race_raises(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "_go_through", interrupted)
    with pytest.raises(KeyboardInterrupt):
        race("mlp", engine="single", out="runs/it")
    assert (here / "runs/it/points.csv").exists()


def test_what_cannot_be_saved_is_refused(here: Path) -> None:
    import threading

    locked = module()
    locked.lock = threading.Lock()  # type: ignore[assignment]
    assert "model Sequential   cannot be saved for the processes that train: TypeError: cannot pickle" in refused(
        locked, BATCH
    )
    (here / "runs/modules").rmdir()
    (here / "runs/modules").write_text("")
    assert "runs/modules   cannot be written" in refused(module(), BATCH)
