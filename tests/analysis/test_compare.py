"""Comparing runs: what is worse, what is noise, and which exit code that has."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import compare
from analysis.accuracy import COMMITTED
from analysis.bench import history
from analysis.compare import Difference
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, RECORD


def run(folder: Path, times_s: Sequence[float], *overrides: str, memory: int = 100, status: str = "ok") -> Path:
    """A run's folder with these measured steps, after one of the warm-up."""
    folder.mkdir(parents=True)
    metrics = {
        "step_time_s": sorted(times_s)[len(times_s) // 2], "peak_memory_bytes": [memory, 1], "loss": 0.5,
        "throughput": 1.0, "phases_s": None, "bubble_fraction": None, "predicted_over_measured": {},
    }  # fmt: skip
    names = {"engine": "gpipe", "model": "mlp", "cluster": "local", "planner": "balance"}
    config = {
        "mode": "run",
        "profile": None,
        "batch": {},
        "mesh": {},
        **{key: {"name": own} for key, own in names.items()},
    }
    manifest = {"overrides": list(overrides), "start_time": "2026-11-25"}
    plan = {"mesh": {"data": 1}}
    made = RunRecord(folder.name, status, config=config, metrics=metrics, manifest=manifest, plan=plan)  # type: ignore[arg-type]
    made.save(folder / RECORD)
    lines = [{"phase": "warmup", "step_time_s": 9.0}, *({"phase": "measured", "step_time_s": one} for one in times_s)]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def noisy(mean_s: float, seed: int) -> list[float]:
    dice = random.Random(seed)
    return [mean_s * dice.gauss(1, 0.05) for _ in range(30)]


@pytest.mark.parametrize(
    ("mean_s", "percent", "code", "said"),
    [
        (1.2, 5, 1, "worse"),
        (1.2, 30, 0, "worse"),
        (0.8, 5, 0, "better"),
        (1.0, 0, 0, "not resolved"),
    ],
)
def test_step_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mean_s: float, percent: float, code: int, said: str
) -> None:
    first, second = run(tmp_path / "a", noisy(1.0, 0)), run(tmp_path / "b", noisy(mean_s, 1))
    arguments = [str(first), str(second), "--figures", "step_time_s", "--max-regression", str(percent)]
    assert compare.main(arguments) == code
    assert said in capsys.readouterr().out


def test_no_difference_is_known_only_as_far_as_the_interval_is_narrow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run(tmp_path / "a", noisy(1.0, 0)), run(tmp_path / "b", noisy(1.0, 1))
    arguments = [str(first), str(second), "--figures", "step_time_s"]
    for percent, said in ((1, "not resolved"), (20, "no difference (within ")):
        assert compare.main([*arguments, "--resolution", str(percent)]) == 0
        assert said in capsys.readouterr().out
    known = Difference("step_time_s", 1.0, 1.001, 0.99, 1.012)
    assert known.verdict() == "no difference (within 1.2 %)" and known.verdict(0.02) == "not resolved"
    assert Difference("step_time_s", 1.0, 1.02, 1.01, 1.03).verdict(0.1) == "worse", "however small, it is real"


def bench(step_s: float, quartiles: tuple[float, float], name: str = "race") -> None:
    row = {"model": "U-Net", "entry": "deepspeed, ZeRO 3", "step": step_s, "quartiles": quartiles, "peak memory": 100}
    history.append(name, 9, [row, {"entry": "failed", "failed": "in its turn"}], {})


def test_results_of_make_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each benchmark its last run, and the one before; a median of 9 rounds is known to 0.6 of their quartiles."""
    monkeypatch.chdir(tmp_path)
    assert compare.main(["bench:1", "bench:0"]) == 2
    assert "runs/bench.jsonl has 0 runs" in capsys.readouterr().err
    for step_s in (9.0, 1.0, 1.3):
        bench(step_s, (step_s * 0.99, step_s * 1.01))
    bench(1.0, (1.0, 1.0), "planning")
    assert compare.main(["bench:1", "bench:0"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "benchmark=race entry=deepspeed, ZeRO 3 model=U-Net step_time_s 1.00 s 1.30 s 1.300 1.2" in printed
    assert "worse" in printed and "memory" in printed and "planning" in printed
    bench(1.31, (1.1, 1.5))
    assert compare.main(["bench:1", "bench:0"]) == 0 and "not resolved" in capsys.readouterr().out
    assert compare.main(["bench:0", "bench:last"]) == 2 and "is no result of make bench" in capsys.readouterr().err


def test_more_memory_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(tmp_path / "a", [1.0], "seed=1"), run(tmp_path / "b", [1.0], "seed=2", memory=110)
    assert compare.main([str(first), str(second)]) == 1
    assert "seed=1 and seed=2" in (printed := capsys.readouterr().out) and "1 of 3 figures are worse" in printed


def test_points_of_sweeps_are_matched_by_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sweep, seeds in (("a", (1, 2)), ("b", (2, 3))):
        for seed in seeds:
            run(tmp_path / sweep / f"{sweep}{seed}", [1.0 + seed], f"seed={seed}", f"out={sweep}", "steps=3")
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert f"only in {tmp_path / 'a'}: seed=1" in printed and f"only in {tmp_path / 'b'}: seed=3" in printed


def test_a_point_that_fails_now_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for sweep, status in (("a", "ok"), ("b", "oom")):
        run(tmp_path / sweep / "1", [1.0], "seed=1", status=status)
        run(tmp_path / sweep / "2", [1.0], "seed=2")
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert f"seed=1 is oom in {tmp_path / 'b'}" in capsys.readouterr().out
    assert compare.main([str(tmp_path / "b"), str(tmp_path / "a")]) == 0


def test_minutes_of_a_race_do_not_change_what_is_compared(tmp_path: Path) -> None:
    for name, minutes in (("a", 1), ("b", 5)):
        for seed in (1, 2):
            run(tmp_path / name / str(seed), [1.0], f"seed={seed}", f"race.minutes={minutes}")
    assert compare.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0


def test_a_pack_is_the_same_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    pack = str(COMMITTED / "schemes-local.jsonl.gz")
    assert compare.main([pack, pack, "--max-regression", "0"]) == 0
    assert "0 of " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["{a}", "{b}", "--figures", "speed,loss"],
            "--figures speed is no figure: there are step_time_s, memory, loss",
        ),
        (["{a}", "/nowhere"], "/nowhere does not exist"),
        (["{a}", "{bare}", "--figures", "loss"], "--figures loss is in no two runs that are compared"),
        (["{a}", "{two}"], "have no run that is ok with the same keys (1 in "),
    ],
)
def test_what_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    places = {"a": run(tmp_path / "a", [1.0], "seed=1"), "b": run(tmp_path / "b", [1.0]), "two": tmp_path / "two"}
    places["bare"] = run(tmp_path / "bare", [1.0])
    bare = RunRecord.load(places["bare"] / RECORD)
    replace(bare, source="simulated", metrics=bare.metrics | {"loss": None}).save(places["bare"] / RECORD)
    for seed in (4, 5):
        run(tmp_path / "two" / str(seed), [1.0], f"seed={seed}")
    assert compare.main([text.format(**places) for text in arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_points_that_differ_in_their_steps_are_compared_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All were compared with the last one, and of two with one title one was shown."""
    for sweep, status in (("a", "ok"), ("b", "error")):
        run(tmp_path / sweep / "1", [1.0], "seed=1", "steps=3")
        run(tmp_path / sweep / "2", [2.0], "seed=1", "steps=9")
        run(tmp_path / sweep / "3", [2.0], "seed=1", "steps=27", status=status)
    both = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert compare.main(both) == 1
    printed = capsys.readouterr().out
    assert "0 of 6 figures" in printed and f"seed=1 steps=27 is error in {both[1]}" in printed
    assert compare.main(both[::-1]) == 0
    assert f"only in {both[0]}: seed=1 steps=27" in capsys.readouterr().out


def test_a_single_run_that_fails_now_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run(tmp_path / "a", [1.0], "seed=1"), run(tmp_path / "b", [1.0], "seed=2", status="timeout")
    assert compare.main([str(first), str(second)]) == 1
    assert f"seed=1 is timeout in {second}" in capsys.readouterr().out
    assert compare.main([str(second), str(first)]) == 2


def test_losses_after_other_numbers_of_steps_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [run(tmp_path / name, [1.0], "seed=1") for name in "ab"]
    made = RunRecord.load(places[1] / RECORD)
    longer = {**made.config, "steps": 9}
    replace(made, config=longer, metrics=made.metrics | {"loss": 9.0}).save(places[1] / RECORD)
    assert compare.main([str(one) for one in places]) == 0
    printed = capsys.readouterr().out
    assert "0 of 2 figures" in printed and "loss after 0 and after 9 steps is not compared: seed=1" in printed


@pytest.mark.parametrize(
    ("first", "second", "worse"), [(-1.0, -2.0, False), (-2.0, -1.0, True), (0.0, 1.0, True), (0.0, -1.0, False)]
)
def test_less_is_better_below_nothing_too(first: float, second: float, worse: bool) -> None:
    one = Difference("loss", first, second)
    assert one.verdict() == ("worse" if worse else "better") and one.is_regression(5) == worse


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """No figure is worse than that."""
    place = str(run(tmp_path / "a", [1.0]))
    with pytest.raises(SystemExit) as ended:
        compare.main([place, place, "--max-regression", "nan"])
    assert ended.value.code == 2


def test_nothing_over_nothing_is_no_regression() -> None:
    zero = Difference("loss", 0.0, 0.0)
    assert zero.verdict() == "the same" and not zero.is_regression(0)


def test_a_loss_that_is_no_number_any_more_is_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Records have null there, which is no figure to compare: it is said, and fails what was a number before."""
    one, other = run(tmp_path / "a", [1.0] * 9), run(tmp_path / "b", [1.0] * 9)
    record = RunRecord.load(other / RECORD)
    replace(record, metrics=record.metrics | {"loss": None}).save(other / RECORD)
    assert compare.main([str(one), str(other)]) == 1
    assert f"loss is no number in {other}: a and b" in capsys.readouterr().out
    assert compare.main([str(other), str(one), "--figures", "loss"]) == 0
    assert f"loss is no number in {other}" in capsys.readouterr().out
    assert compare.main([str(one), str(other), "--figures", "memory"]) == 0
    assert "no number" not in capsys.readouterr().out
    assert compare.main([str(other), str(other)]) == 0
