"""Which way a profile comes from, and what follows from a stored one."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.checks import stored_profile
from harness.cli.compose import compose
from harness.core import run_files
from harness.core.cluster import Cluster, Device
from harness.core.model_profile import LayerProfile, ModelProfile, Unsplit
from harness.core.problem import CannotRun
from harness.planning import profiles
from harness.planning.profiles import Profiles
from harness.report.progress import Progress
from tests.problems import refused, rows

FLAT = ["cluster=flat", "cluster.devices=2", "cluster.memory_gb=1", "cluster.bandwidth_gb_s=1"]
HERE = Device("here", 10**9, {"float32": 1e12}, 1e10)
PROFILE = ModelProfile((LayerProfile("l", 1.0, 2.0),) * 3, "unet_x", 5, source="measured on X", times="measured")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path / "cache"))


def made(folder: Path, *typed: str) -> Profiles:
    return Profiles(compose(typed), typed, folder, Progress(Console(file=io.StringIO())))


@pytest.mark.parametrize(
    ("typed", "peaks", "origin"),
    [
        ([], False, "measured"),
        (["costs=analytic"], False, "counted"),
        (["costs=measured", *FLAT], True, "measured"),
        (["costs=scaled", *FLAT], True, "measured"),
        (FLAT, False, "measured"),
        (FLAT, True, "counted"),
        ([], True, "measured"),
    ],
    ids=["local", "local analytic", "as measured here", "scaled from here", "no peaks", "peaks", "local with peaks"],
)
def test_what_is_counted_and_what_is_measured(typed: list[str], peaks: bool, origin: str) -> None:
    cluster = Cluster(device=HERE if peaks else Device())
    assert profiles.origin(compose(typed), cluster) == origin


def test_a_stored_profile_comes_first(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    typed = [f"profile={tmp_path / 'p.json'}", "costs=analytic"]
    assert profiles.origin(compose(typed), Cluster(device=HERE)) == "file"
    assert made(tmp_path, *typed).raw("file", HERE) == PROFILE, "the file knows its own device"


def test_the_batch_follows_from_a_stored_profile(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    typed = [f"profile={tmp_path / 'p.json'}", "batch.micro_batches=4"]
    for more, size in ([], 20), (["batch.size=40"], 40):
        config = compose([*typed, *more])
        stored_profile.follow(config, [*typed, *more])
        assert config.batch.size == size


def test_counts_are_the_same_for_every_device_and_cluster(tmp_path: Path) -> None:
    here, there = made(tmp_path), made(tmp_path, *FLAT, "cluster.efficiency=0.5")
    assert here.place("counted") == there.place("counted") != here.place("measured")
    assert made(tmp_path, "batch.micro_batches=4").place("counted") != here.place("counted")


def test_a_cached_measurement_gets_the_device_that_is_known_now(tmp_path: Path) -> None:
    one = made(tmp_path)
    assert not one.is_there("measured")
    PROFILE.save(one.place("measured"))
    assert one.is_there("measured")
    assert one.raw("measured", HERE).device == HERE
    assert one.raw("measured", None).device is None
    PROFILE.save(one.place("counted"))
    assert one.raw("counted", HERE).device is None


def test_it_is_reported_where_a_profile_is_from_and_how_old_it_is(tmp_path: Path) -> None:
    one = made(tmp_path)
    PROFILE.save(one.place("measured"))
    os.utime(one.place("measured"), times=(0, time.time() - 190))
    one.raw("measured", HERE)
    assert one.found == "made here 3 min ago, cached (remeasure=true measures again)"
    file = tmp_path / "p.json"
    PROFILE.save(file)
    os.utime(file, times=(0, time.time() - 3 * 86400))
    stored = made(tmp_path, f"profile={file}")
    stored.raw("file", HERE)
    assert stored.found == f"{file}, 3 d old"


@pytest.mark.parametrize("code", ["if x.sum() > 0:", "if x.sum() > 1:"])
def test_a_cached_profile_has_the_name_and_the_lines_of_now(tmp_path: Path, code: str) -> None:
    """Of a user's model whose file was moved; one that names a line which is not there is made again."""
    before, now = (tmp_path / name for name in ("before.py", "now.py"))
    for file in (before, now):
        file.write_text("def build(width: int = 8):\n    pass\n    if x.sum() > 0:\n        pass\n")
    of_before, one = (made(tmp_path, f"model={file}:build", "model.width=9") for file in (before, now))
    assert of_before.place("counted") == one.place("counted")
    assert one.place("counted") != made(tmp_path, f"model={now}:build").place("counted")
    known = replace(PROFILE, model="before.py:build width=9", unsplit=Unsplit(str(before), 3, code, "it reads"))
    known.save(one.place("counted"))
    found = one.cached("counted")
    assert (found and found.model) == (None if "> 1" in code else "now.py:build width=9")


def test_a_profile_that_is_made_now_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles.supervisor, "run_worker", lambda folder, *_: PROFILE.save(folder / run_files.PROFILE))
    one = made(tmp_path)
    one.raw("measured", HERE)
    assert one.found == "made just now"
    one.raw("measured", HERE)
    assert re.fullmatch(r"made here \d+ s ago, cached \(remeasure=true measures again\)", one.found)
    one.raw("counted", HERE)
    one.raw("counted", HERE)
    assert re.fullmatch(r"made here \d+ s ago, cached", one.found), "counts do not depend on what the machine does"


def test_an_old_profile_is_measured_again_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search and a sweep ask for the same profile several times."""
    asked: list[str] = []

    def measured(folder: Path, *words: object) -> None:
        asked.append(str(words[2]))
        replace(PROFILE, source="measured again").save(folder / run_files.PROFILE)

    monkeypatch.setattr(profiles.supervisor, "run_worker", measured)
    one = made(tmp_path, "remeasure=true")
    for origin in ("measured", "counted"):
        PROFILE.save(one.place(origin))
        os.utime(one.place(origin), times=(0, profiles.profile_cache.BEGUN_S - 1))
    assert one.is_there("counted") and one.raw("counted", HERE) == PROFILE
    assert not one.is_there("measured")
    for _ in range(2):
        assert one.raw("measured", HERE).source == "measured again"
    assert asked == ["profile"]
    assert made(tmp_path).raw("measured", HERE).source == "measured again", "what was measured is kept"


@pytest.mark.parametrize(
    ("slowed", "load", "again"), [(1.19, 0.0, False), (1.2, 0.0, True), (1.2, 1e3, False)],
    ids=["measured quietly", "measured while busy", "busy still"],
)  # fmt: skip
def test_times_of_a_busy_machine_are_measured_again_on_a_quiet_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowed: float, load: float, again: bool
) -> None:
    """Once in a process: a sweep asks for the same profile many times, and may keep the machine busy itself."""
    asked: list[str] = []

    def measured(folder: Path, *words: object) -> None:
        asked.append(str(words[2]))
        replace(PROFILE, slowed=slowed).save(folder / run_files.PROFILE)

    monkeypatch.setattr(profiles.supervisor, "run_worker", measured)
    monkeypatch.setattr(profiles.run_queue.os, "getloadavg", lambda: (load, 0.0, 0.0))
    one = made(tmp_path)
    replace(PROFILE, slowed=slowed).save(one.place("measured"))
    os.utime(one.place("measured"), times=(0, profiles.profile_cache.BEGUN_S - 1))
    for _ in range(2):
        one.raw("measured", HERE)
    assert asked == ["profile"] * again
    os.utime(one.place("measured"), times=(0, profiles.profile_cache.BEGUN_S - 1))
    made(tmp_path).raw("measured", HERE)
    assert asked == ["profile"] * again, "in a later process, too"


@pytest.mark.parametrize(
    ("slowed", "typed", "reported"),
    [(1.19, [], []), (1.2, [], ["remeasure=true, while nothing else runs"]), (9.0, ["costs=none"], []),
     (9.0, ["FILE"], ["mode=profile remeasure=true where it was made, while nothing else runs"])],
)  # fmt: skip
def test_times_of_a_busy_machine_are_doubted(
    tmp_path: Path, slowed: float, typed: list[str], reported: list[str]
) -> None:
    file = tmp_path / "p.json"
    profile = replace(PROFILE, slowed=slowed)
    profile.save(file)
    one = made(tmp_path, *(f"profile={file}" if key == "FILE" else key for key in typed))
    doubt = one.doubt(one.priced(profile, Cluster(device=HERE)))
    assert ([doubt.hint] if doubt else []) == reported
    if doubt:
        key = ("profile", str(file)) if typed else ("profile of micro-batches of 5", None)
        assert (doubt.key, doubt.value) == key
        assert f"{slowed:.2f} times" in doubt.message


def test_a_file_that_is_no_profile(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    for name, what in ("p.json", "is not JSON"), ("nowhere.json", "No such file"):
        with pytest.raises(CannotRun, match=what) as caught:
            stored_profile.stored(str(tmp_path / name))
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("profile", str(tmp_path / name))


def test_a_profile_of_another_model_is_refused_as_soon_as_it_is_read(tmp_path: Path) -> None:
    """With all else that is wrong with it, and before anything is planned."""
    file = tmp_path / "p.json"
    PROFILE.save(file)
    other, samples = ["without profile"], ["batch.size=40"]
    for typed, found in ((["model=gpt"], [other, samples]), (["model=gpt", "batch.size=40"], [other])):
        with pytest.raises(CannotRun) as caught:
            made(tmp_path, f"profile={file}", *typed).raw("file", HERE)
        assert rows(refused(caught)) == [("profile", str(file), fixes) for fixes in found]
    for typed in ([], ["model=unet"]):
        assert made(tmp_path, f"profile={file}", *typed).raw("file", HERE) == PROFILE


@pytest.mark.parametrize("costs", ["auto", "measured", "analytic", "scaled"])
def test_a_profile_with_neither_times_nor_work_is_refused_by_its_name(tmp_path: Path, costs: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(
        '{"layers": [{"param_bytes": 1, "forward_s": 0, "backward_s": 0}, {"forward_s": 0, "backward_s": 0}]}'
    )
    one = made(tmp_path, f"profile={file}", f"costs={costs}", *FLAT)
    with pytest.raises(CannotRun) as caught:
        one.priced(stored_profile.stored(str(file)), Cluster(device=HERE))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("profile", str(file)) and "in all 2 layers" in problem.message
    none = made(tmp_path, f"profile={file}", "costs=none")
    assert none.priced(stored_profile.stored(str(file)), Cluster(device=HERE)).source == "none, unknown"


def test_what_fixes_a_profile_without_times_works(tmp_path: Path) -> None:
    for number, fields in enumerate(('"forward_s": 1, "backward_s": 2', '"flops": 3e9, "bytes_moved": 8')):
        file = tmp_path / f"{number}.json"
        file.write_text(f'{{"layers": [{{{fields}}}]}}')
        one = made(tmp_path, f"profile={file}", *FLAT)
        assert one.priced(stored_profile.stored(str(file)), Cluster(device=HERE)).layers[0].forward_s > 0


def test_a_file_is_read_again_only_if_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    PROFILE.save(file)
    first = stored_profile.stored(str(file))
    assert stored_profile.stored(str(file)) is first
    replace(PROFILE, micro_batch=7).save(file)
    assert stored_profile.stored(str(file)).micro_batch == 7


def test_what_is_wrong_in_a_file_is_named_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    for text, said in (
        ('{"layers": []}', "ModelProfile: a profile needs at least one layer, this one has 0"),
        ('{"layers": [{"forward_s": "1"}]}', "layers[0].forward_s: expected a number, got '1'"),
        ('{"layers": [{"forward_s": -1}]}', "layers[0]: forward_s of layer '' is -1.0, must be a number of at least 0"),
    ):
        file.write_text(text)
        with pytest.raises(CannotRun) as caught:
            stored_profile.stored(str(file))
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("profile", str(file)) and problem.message.startswith(said)


def test_layers_that_have_lost_a_time_are_named(tmp_path: Path) -> None:
    path = tmp_path / "lost.json"
    path.write_text('{"schema": 2, "layers": [{"name": "a", "forward_s": 1, "backward_s": 2}, {"forward_s": 1}]}')
    with pytest.raises(CannotRun) as caught:
        stored_profile.stored(str(path))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("profile", str(path)) and "layer 1" in problem.message


def test_a_profile_in_a_line() -> None:
    said = profiles.described(ModelProfile((LayerProfile("l", 0.5, 1.0, 2e9, param_bytes=1024),) * 2, "net", 5))
    assert (
        said
        == "net: 2 layers, 2.0 KiB of parameters; 5 samples: 4 GFLOP forward, 1.00 s forward, 2.00 s backward; unknown"
    )


SHEET = "its data sheet's TFLOP/s as cluster.peak_tflops."


@pytest.mark.parametrize(
    ("typed", "origin", "said"),
    [
        (FLAT, "measured", f"{SHEET}float32 and GB/s as cluster.memory_bandwidth_gb_s"),
        ([*FLAT, "cluster.memory_bandwidth_gb_s=9"], "measured", f"{SHEET}float32"),
        ([*FLAT, "precision=bf16"], "measured",
         f"{SHEET}bfloat16 and GB/s as cluster.memory_bandwidth_gb_s"),
        ([*FLAT, "costs=measured"], "measured", ""),
        ([*FLAT, "cluster.peak_tflops.float32=1"], "counted", ""),
        ([], "measured", ""),
    ],
    ids=["no peaks", "bandwidth alone", "autocast", "as the user asks", "counted", "local"],
)  # fmt: skip
def test_profiling_for_a_described_cluster_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], origin: profiles.Origin, said: str
) -> None:
    monkeypatch.setattr(profiles.supervisor, "run_worker", lambda folder, *_: PROFILE.save(folder / run_files.PROFILE))
    one = made(tmp_path, *typed)
    one.made(origin)
    printed = one.progress.console.file.getvalue().strip()  # type: ignore[attr-defined]
    why = "; profiling here, since cluster.peak_tflops is not given: the layer times will be this machine's -> "
    assert printed.partition(", micro-batches of 2")[2] == (why + said if said else "")
