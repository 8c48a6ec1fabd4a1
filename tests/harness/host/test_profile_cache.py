"""What a cached profile depends on, and that a spoilt cache never ends a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.products import Product
from harness.host import profile_cache
from tests.tiers import examples

ROOT = Path(__file__).parents[3]
PROFILE = ModelProfile(
    (
        LayerProfile("a", 0.1, 0.2, param_bytes=5, tied=(Tied("a.weight", 4),), products=(Product("a", in_=3),)),
        LayerProfile("b", param_bytes=4, tied=(Tied("a.weight", 4),)),
    ),
    model="net_1", micro_batch=2, input_bytes=8, skips=(Skip(0, 1, 4, "s"),), source="measured on X, 1 thread, torch 2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "net"
    (folder / "inner").mkdir(parents=True)
    for name in ("config.py", "net.py", "inner/block.py"):
        (folder / name).write_text(f"# {name}\n")
    return folder


def asked(package: Path, **changes: object) -> Path:
    arguments = {
        "model_config": {"name": "net", "layers": 2, "size": [8, 8]},
        "model_package": package, "micro_batch": 2, "dtype": "float32", "device_name": "AMD EPYC",
    }  # fmt: skip
    return profile_cache.path(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["tf32", "cudnn_benchmark", "channels_last"])
def test_times_of_other_kernels_are_others(package, cache, key):
    assert asked(package, **{key: True}) != asked(package) == asked(package, **{key: False})


def test_the_same_question_has_the_same_path(package, cache):
    path = asked(package)
    assert path == asked(package, model_config={"size": [8, 8], "layers": 2, "name": "net"})
    assert path == asked(package / "config.py")
    assert path.parent == cache / "profiles"
    assert path.name.startswith("net-2-float32-")


@pytest.mark.parametrize(
    "change",
    [
        {"model_config": {"name": "net", "layers": 3, "size": [8, 8]}},
        {"model_config": {"name": "net", "layers": "2", "size": [8, 8]}},
        {"micro_batch": 3},
        {"dtype": "float64"},
        {"autocast": "bfloat16"},
        {"device_name": "NVIDIA H200"},
    ],
    ids=str,
)
def test_another_question_has_another_path(package, change):
    assert asked(package, **change) != asked(package)


@pytest.mark.parametrize("edited", ["config.py", "net.py", "inner/block.py"])
def test_editing_the_model_invalidates(package, edited):
    before = asked(package)
    (package / edited).write_text("# edited\n")
    assert asked(package) != before


def test_editing_a_module_that_models_share_invalidates(package):
    before = asked(package)
    (package.parent / "shared.py").write_text("# loss and head of several models\n")
    assert asked(package) != before


def test_a_new_file_or_a_moved_line_invalidates(package):
    paths = [asked(package)]
    (package / "more.py").write_text("")
    paths.append(asked(package))
    (package / "config.py").write_text("")
    (package / "more.py").write_text("# config.py\n")
    paths.append(asked(package))
    assert len(set(paths)) == 3


def test_files_that_are_no_source_do_not_matter(package):
    before = asked(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "net.cpython-311.pyc").write_bytes(b"\0")
    assert asked(package) == before


def test_a_model_may_be_one_module(tmp_path):
    module = tmp_path / "tiny.py"
    module.write_text("a = 1\n")
    before = asked(module)
    (tmp_path / "neighbour.py").write_text("b = 1\n")
    assert asked(module) == before
    module.write_text("a = 2\n")
    assert asked(module) != before


def test_torch_and_the_way_of_measuring_matter(package, monkeypatch):
    paths = [asked(package)]
    monkeypatch.setattr(profile_cache, "MEASURING", profile_cache.MEASURING[1:])
    paths.append(asked(package))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    paths.append(asked(package))
    assert len(set(paths)) == 3


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert profile_cache.folder() == tmp_path / "cache" / "profiles"
    monkeypatch.setenv("REGATTA_CACHE", "")
    assert profile_cache.folder() == tmp_path / "xdg" / "regatta" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_cache.folder() == tmp_path / "home" / ".cache" / "regatta" / "profiles"


def test_round_trip(package):
    path = asked(package)
    assert profile_cache.load(path) is None
    profile_cache.store(path, PROFILE)
    assert profile_cache.load(path) == PROFILE
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_what_is_older_than_this_process_is_measured_again_if_that_is_asked_for(package):
    path = asked(package)
    assert not profile_cache.exists(path) and not profile_cache.exists(path, remeasure=True)
    profile_cache.store(path, PROFILE)
    assert profile_cache.exists(path) and profile_cache.exists(path, remeasure=True)
    os.utime(path, times=(0, profile_cache.BEGUN_S - 1))
    assert profile_cache.exists(path) and not profile_cache.exists(path, remeasure=True)


@pytest.mark.parametrize(
    "spoilt",
    [b"", b"{", b"\xff\xfe\x00", b"null", b"[]", b"{}", b'{"schema": 0, "layers": [{}]}', b'{"layers": []}',
     b'{"schema": 2, "layers": [{"forward_s": NaN}]}',
     b'{"schema": 1, "layers": [{"name": "a"}]}', b'{"layers": [{"name": "a", "unknown": 1}]}', b"[" * 100_000],
    ids=range(12),
)  # fmt: skip
def test_what_cannot_be_read_is_measured_again(package, spoilt):
    path = asked(package)
    path.parent.mkdir(parents=True)
    path.write_bytes(spoilt)
    with pytest.warns(UserWarning, match=f"the cache is damaged, this is measured again: {path}"):
        assert profile_cache.load(path) is None
    profile_cache.store(path, PROFILE)
    assert profile_cache.load(path) == PROFILE


@pytest.mark.filterwarnings("ignore:the cache is damaged")
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_gives_a_profile_or_none(tmp_path, data):
    text = json.dumps(PROFILE.to_json())
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    (tmp_path / "p.json").write_text(text[:start] + data.draw(st.text(max_size=3)) + text[end:], encoding="utf-8")
    assert isinstance(profile_cache.load(tmp_path / "p.json"), ModelProfile | None)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, package):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "file"))
    path = asked(package)
    assert profile_cache.load(path) is None
    with pytest.warns(UserWarning, match="REGATTA_CACHE"):
        profile_cache.store(path, PROFILE)


def test_a_folder_in_place_of_the_file(package):
    path = asked(package)
    path.mkdir(parents=True)
    with pytest.warns(UserWarning, match="Is a directory"):
        assert profile_cache.load(path) is None
    with pytest.warns(UserWarning, match="not cached"):
        profile_cache.store(path, PROFILE)


def test_it_works_without_torch(package):
    program = (
        "import sys; from pathlib import Path; from harness.host import profile_cache as cache;"
        f"cache.load(cache.path({{'name': 'net'}}, Path({str(package)!r}), 2, 'float32', 'X'));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
