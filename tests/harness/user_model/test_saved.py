"""A module of this process as a file that another one loads: its weights, its code, its digest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from harness.config import registry
from harness.user_model import sources
from harness.user_model.load import load
from harness.user_model.reference import Reference
from harness.user_model.saved import save
from tests.harness.user_model import nets


def built(place: Reference) -> Any:
    return load(place)()


def test_it_has_the_weights_and_each_call_makes_its_own(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    place = save(module, "Sequential", tmp_path / "modules")
    one, other = built(place), built(place)
    assert all(map(torch.equal, one.parameters(), module.parameters()))
    assert one[0].weight is one[1].weight is not other[0].weight
    with torch.no_grad():
        one[0].weight.zero_()
    assert torch.equal(other[0].weight, module[0].weight)
    with torch.device("meta"):
        assert all(weight.is_meta for weight in built(place).parameters())


def test_the_same_one_is_saved_once(tmp_path: Path) -> None:
    module = nn.Linear(3, 3)
    place = save(module, "Linear", tmp_path)
    assert save(module, "Linear", tmp_path) == place
    assert [path.name for path in tmp_path.iterdir()] == [Path(place.place).parent.name]
    before = sources.digest(place), sources.code(place)
    with torch.no_grad():
        module.bias.add_(1)
    changed = save(module, "Linear", tmp_path)
    assert changed != place
    assert sources.digest(changed) != before[0] and sources.code(changed) != before[1]


def test_parametrized_modules_are_loaded_with_their_parametrizations(tmp_path: Path) -> None:
    """Which torch alone pickles in no way."""
    module = nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), spectral_norm(orthogonal(nn.Linear(4, 4))))
    module[0].mine = 5
    made = built(save(module, "Sequential", tmp_path))
    assert made[0].mine == 5 and made.state_dict().keys() == module.state_dict().keys()
    x = torch.randn(2, 3)
    assert torch.equal(made.eval()(x), module.eval()(x))
    assert isinstance(made[2], nn.Linear) and type(made[2]) not in (nn.Linear, type(made[0]), type(module[2]))
    made[0].parametrizations.weight.original0.data.mul_(2)
    assert not torch.equal(made(x), module(x)), "weights are computed from what is trained"


def test_what_is_compiled_or_wrapped_is_loaded_without(tmp_path: Path) -> None:
    inner = nn.Linear(3, 3)
    made = built(save(nn.Sequential(torch.compile(nn.DataParallel(inner))), "Sequential", tmp_path))
    assert type(made[0]) is nn.Linear and torch.equal(made[0].weight, inner.weight)


@pytest.mark.usefixtures("commands")
def test_classes_of_a_program_come_with_their_code_and_modules_by_name(tmp_path: Path) -> None:
    """Where neither is found: another process, in another folder."""
    nets.write(tmp_path / "mine", "from torch import nn\n\n\nclass Half(nn.Linear):\n    own = 5\n", "half_of_mine.py")
    script = """
from pathlib import Path
import sys
sys.path.insert(0, "mine")
from torch import nn
from half_of_mine import Half
from harness.user_model.saved import save

class Net(nn.Sequential):
    size = 7

print(save(Net(Half(3, 3)), "Net", Path("modules")).place)
"""
    run = {"capture_output": True, "text": True, "check": False, "env": {"PYTHONPATH": str(registry.ROOT)}}
    done: Any = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, **run)
    assert done.returncode == 0, done.stderr
    code = "import sys; from harness.user_model.load import load; from harness.user_model.reference import parse; "
    code += "net = load(parse(sys.argv[1]))(); print(net.size, net[0].own)"
    done = subprocess.run([sys.executable, "-c", code, f"{done.stdout.strip()}:build"], cwd="/", **run)
    assert (done.returncode, done.stdout) == (0, "7 5\n"), done.stderr


def test_an_edit_of_a_module_that_it_imports_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    text = "from torch import nn\n\n\nclass Third(nn.Linear):\n    own = 3\n"
    nets.write(tmp_path / "mine", text, "third_of_mine.py")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    module = importlib.import_module("third_of_mine").Third(3, 3)
    place = save(module, "Third", tmp_path / "modules")
    assert save(module, "Third", tmp_path / "modules") == place
    nets.write(tmp_path / "mine", text.replace("own = 3", "own = 4"), "third_of_mine.py")
    assert save(module, "Third", tmp_path / "modules") != place
