"""Plug-ins are found by what their files hold, and nothing is imported on the way."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import registry
from harness.core.problem import CannotRun
from tests.problems import rows

KEYS = "raise ImportError('scanning must not import')\nclass Config: ...\n"
BUILD = "raise ImportError('scanning must not import')\ndef build(config): ...\n"
PLUGIN = KEYS + BUILD


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_scan_finds_modules_and_packages_and_leaves_helpers(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "engines/__init__.py": PLUGIN,
            "engines/fast.py": PLUGIN,
            "engines/helper.py": "def build(): ...",
            "engines/big/engine.py": PLUGIN,
            "engines/big/session.py": PLUGIN,
            "engines/parts/stage.py": PLUGIN,
            "models/net/config.py": KEYS,
            "models/net/net.py": BUILD,
            "models/data/digits.py": PLUGIN,
            "harness/trackers/none.py": PLUGIN,
        },
    )
    assert [(found.group, found.name, found.module) for found in registry.scan(root)] == [
        ("engine", "big", "engines.big.engine"),
        ("engine", "fast", "engines.fast"),
        ("model", "net", "models.net.config"),
        ("data", "digits", "models.data.digits"),
        ("tracker", "none", "harness.trackers.none"),
    ]


def test_scan_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    put(tmp_path, {"planners/odd.py": "class Config: ...\n"})
    with pytest.raises(CannotRun) as caught:
        registry.scan(tmp_path)
    (problem,) = caught.value.problems
    assert problem.key == str(tmp_path / "planners/odd.py")


def test_a_plugin_that_is_not_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, {"planners/odd_planner.py": "class Config:\n  x = = 3\ndef build(config): ...\n"})
    (plugin,) = registry.scan(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "planners"))
    found = registry.Plugin(plugin.group, plugin.name, "odd_planner", plugin.path)
    monkeypatch.setattr(registry, "_here", lambda: {("planner", "odd_planner"): found})
    with pytest.raises(CannotRun) as caught:
        registry.schemas.__wrapped__()
    (problem,) = caught.value.problems
    assert problem.key == str(tmp_path / "planners/odd_planner.py")


def test_what_is_here() -> None:
    names = {(found.group, found.name) for found in registry.scan()}
    assert names >= {
        ("engine", "single"),
        ("engine", "gpipe"),
        ("planner", "uniform"),
        ("planner", "balance"),
        ("model", "unet"),
        ("data", "synthetic"),
        ("data", "images"),
        ("tracker", "wandb"),
        ("tracker", "none"),
    }


def test_schemas_and_register_do_without_torch() -> None:
    code = "import sys; from harness.config import registry; registry.register(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=registry.ROOT, check=False).returncode == 0


def test_every_key_has_a_meaning_and_a_type() -> None:
    from harness.cli.help import keys
    from harness.config.schema import Config

    for config in [Config, *registry.schemas().values()]:
        for entry in keys(config, ""):
            assert len(entry.split()) > 1, f"{config.__module__}: no docstring under {entry}"


def test_build_takes_a_node_from_a_file_and_checks_it() -> None:
    planner = registry.build("planner", OmegaConf.create({"name": "balance", "by": "memory"}))
    assert planner.config.by == "memory"
    assert planner.config.method == "exact", "what the file lacks has its default"
    with pytest.raises(OmegaConfBaseException, match="metod"):
        registry.build("planner", OmegaConf.create({"name": "balance", "metod": "exact"}))


def test_build_of_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(CannotRun) as caught:
        registry.build("planner", OmegaConf.create({"name": "balanced"}))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("planner", "balanced") and "balance" in problem.message


def test_problems_are_those_of_the_plugin() -> None:
    node = OmegaConf.create({"name": "unet", "convs": 0, "channels": 16, "size": 128, "dropout": 0.1})
    assert rows(registry.problems("model", node)) == [("model.convs", 0, ["model.convs=1"])]
    assert registry.problems("model", OmegaConf.create({"name": "unet"})) == []
    assert registry.problems("planner", OmegaConf.create({"name": "uniform"})) == []


# -- functions of a plug-in that end the process, or return something else


def plugin(monkeypatch: pytest.MonkeyPatch, **functions: object) -> ModuleType:
    """The planner `uniform`, with these functions."""
    registry.register()
    module = importlib.import_module("planners.uniform")
    for name, function in functions.items():
        monkeypatch.setattr(module, name, function, raising=False)
    return module


NODE = OmegaConf.create({"name": "uniform"})


@pytest.mark.parametrize(
    ("returned", "text"), [(5, "int 5"), (None, "None"), ("no", "str 'no'"), (["no"], "a list with str 'no'")]
)
def test_a_check_that_returns_no_problems_is_named(
    returned: object, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = plugin(monkeypatch, check=lambda config: returned)
    with pytest.raises(CannotRun) as caught:
        registry.problems("planner", NODE)
    (problem,) = caught.value.problems
    assert problem.key == module.__file__
    assert problem.message == f"check() returned {text}, it must return a list of harness.core.problem.Problem"


@pytest.mark.parametrize("returned", [None, 5])
def test_a_build_that_returns_something_else_is_named(returned: object, monkeypatch: pytest.MonkeyPatch) -> None:
    module = plugin(monkeypatch, build=lambda config: returned)
    with pytest.raises(CannotRun) as caught:
        registry.build("planner", NODE)
    (problem,) = caught.value.problems
    assert problem.key == module.__file__
    assert "it must return a harness.interfaces.Planner" in problem.message


@pytest.mark.parametrize("code", [0, 3])
def test_a_function_that_ends_the_process_is_named(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module = plugin(monkeypatch, check=lambda config: sys.exit(code), build=lambda config: sys.exit(code))
    for name, call in (("check()", registry.problems), ("build()", registry.build)):
        with pytest.raises(CannotRun) as caught:
            call("planner", NODE)
        (problem,) = caught.value.problems
        assert problem.key == module.__file__ and problem.message.startswith(f"{name} calls sys.exit({code})")
