"""The file of how long tests take, of which tests/tiers.py makes the tiers."""

from __future__ import annotations

from tests import durations
from tests.durations import HERE, Measured


def test_a_line_has_the_mean_of_all_cases_of_a_slow_test() -> None:
    seconds = {"tests/a.py::test_it": [2.0], "tests/b.py::test_it": [0.2, 0.8], "tests/c.py::test_many": [0.1] * 200}
    measured = [Measured(test, one) for test, each in seconds.items() for one in each]
    measured.append(Measured("tests/a.py::test_short", 0.1))
    assert durations.table(measured).splitlines() == [
        "2.0\t2.0\ttests/a.py::test_it",
        "0.5\t1.0\ttests/b.py::test_it",
        "0.1\t20.0\ttests/c.py::test_many",
    ]


def test_cases_share_the_time_in_which_something_is_made_for_all_of_them() -> None:
    first = Measured("tests/a.py::test_first", 5.1, setup_s=5.0, module="tests/a.py")
    second = Measured("tests/a.py::test_second", 0.2, setup_s=0.0, module="tests/a.py")
    assert durations.table([first, second, Measured("tests/a.py::test_alone", 0.2)]).splitlines() == [
        "2.6\t2.6\ttests/a.py::test_first",
        "2.7\t2.7\ttests/a.py::test_second",
    ]


def test_a_case_has_the_name_of_its_test() -> None:
    assert durations.name("tests/a.py::test_it[gpt-2]@tests/a.py") == "tests/a.py::test_it"
    assert durations.name("tests/a.py::test_it@slurm") == "tests/a.py::test_it"


def test_every_test_of_the_file_is_there() -> None:
    """Else it was given another name, and its line, too, needs it: python -m tests.durations."""
    missing = []
    for test in durations.known():
        file, function = test.split("::")
        path = HERE.parent / file
        if not path.is_file() or f"def {function}(" not in path.read_text(encoding="utf-8"):
            missing.append(test)
    assert not missing, missing
