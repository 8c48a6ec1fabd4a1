"""The parameters of a callable become keys: by the source, or by an import, with the same result."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.problem import CannotRun
from harness.user_model import literal_signature, loaded_signature, reference, signature
from harness.user_model.parameters import Signature
from tests.harness.user_model import nets

TYPES = '''\
from __future__ import annotations
import enum
import typing as t
from collections.abc import Sequence
from typing import Any, List, Literal, Optional, Tuple, Union


def build(a: int, b: float = 1, c: bool = False, d: str = "x y", e: Optional[int] = None, f: int | None = 3,
          g: list[int] = (1, 2), h: Tuple[float, ...] = (1.0, 2.0), i: tuple[int, int] = (3, 3),
          j: Literal["p", "q"] = "q", k: Literal[1, 2, None] = None, l: Sequence[str] = ("u",), m=7, n=(1, 2.5),
          o: Any = "any", p: List[int] = [1], q: Union[str, None] = "z", *, r: t.Optional[bool] = True,
          s: int = None, u: Literal[1, "mixed"] = 1, w: list = [True], x=None, y=(), z: "int" = -4):
    """What it is."""
'''
KINDS = {
    "a": ("int",), "b": ("float",), "c": ("bool",), "d": ("str",), "e": ("int", True), "f": ("int", True),
    "g": ("int", False, True), "h": ("float", False, True), "i": ("int", False, True, 2),
    "j": ("str", False, False, None, ("p", "q")), "k": ("int", True, False, None, (1, 2)), "l": ("str", False, True),
    "m": ("int",), "n": ("float", False, True), "o": ("str",), "p": ("int", False, True), "q": ("str", True),
    "r": ("bool", True), "s": ("int", True), "w": ("bool", False, True), "z": ("int",),
}  # fmt: skip


def read(folder: Path, text: str, name: str = "build") -> Signature:
    nets.write(folder, text)
    return signature.read(reference.parse(f"{folder / 'net.py'}:{name}"))


def imported(folder: Path, text: str, name: str = "build") -> Signature:
    nets.write(folder, text)
    return signature._inspected(reference.parse(f"{folder / 'net.py'}:{name}"))


def by_source(folder: Path, text: str, name: str = "build") -> Signature | None:
    nets.write(folder, text)
    return literal_signature.of(folder / "net.py", name)


@pytest.mark.usefixtures("commands")
def test_types(tmp_path: Path) -> None:
    """Both ways: what no key can hold keeps its default."""
    for found in (by_source(tmp_path, TYPES), imported(tmp_path, TYPES)):
        assert found is not None and found.meaning == "What it is."
        kinds = {one.name: one.kind for one in found.keys}
        shown = {
            name: (kind.base, kind.optional, kind.many, kind.length, kind.choices)
            for name, kind in kinds.items()
            if kind
        }
        defaults = ("", False, False, None, ())
        assert shown == {name: (*kind, *defaults[len(kind) :]) for name, kind in KINDS.items()}
        values = {one.name: one.default for one in found.keys}
        assert (values["b"], values["g"], values["i"], values["n"], values["z"]) == (1, [1, 2], [3, 3], [1, 2.5], -4)
        assert [one.name for one in found.parameters if one.required] == ["a"]


@pytest.mark.usefixtures("commands")
def test_enums_and_what_decorators_leave_take_an_import(tmp_path: Path) -> None:
    text = (
        "import enum, functools\nclass Act(enum.Enum):\n    RELU = 'r'\n    GELU = 'g'\n"
        "def plain(act: Act = Act.RELU, acts: list[Act] = [Act.GELU], size: int = 2 * 3): ...\n"
        "@functools.wraps(plain)\ndef build(*given, **named): ...\n"
    )
    assert by_source(tmp_path, text) is None
    found = {one.name: one for one in read(tmp_path, text).keys}
    assert (found["act"].default, found["acts"].default, found["size"].default) == ("RELU", ["GELU"], 6)
    assert found["act"].kind and found["act"].kind.choices == ("RELU", "GELU")


@pytest.mark.parametrize(
    "text",
    [
        "def build(a: int = 1): ...\nbuild = print\n",
        "def build(a: int = 1): ...\nif True:\n    def build(b: int = 2): ...\n",
        "from torch import *\ndef build(a: int = 1): ...\n",
        "int = str\ndef build(a: int = 1): ...\n",
        "def Literal(x): ...\ndef build(a: Literal[1] = 1): ...\n",
        "def other():\n    global build\n    build = 3\ndef build(a: int = 1): ...\n",
        "def build(a: int = 1): ...\nbuild.__signature__ = None\n",
        "def build(a: int = len('x')): ...\n",
        "class build:\n    pass\n",
        "class build:\n    def __new__(cls, a: int): ...\n    def __init__(self, b: int): ...\n",
        "class build(metaclass=type):\n    def __init__(self, b: int): ...\n",
        "def build(a: list['int'] = [1]): ...\n",
        "def build(a: dict = None): ...\n",
        "for build in range(3): ...\ndef build(a: int = 1): ...\n",
        "try:\n    import x\nexcept ImportError as build:\n    pass\ndef build(a: int = 1): ...\n",
    ],
)
def test_what_only_an_import_can_say(text: str, tmp_path: Path) -> None:
    assert by_source(tmp_path, text) is None


@pytest.mark.fast
@pytest.mark.usefixtures("commands")
def test_a_class(tmp_path: Path) -> None:
    text = (
        "from torch import nn\nclass build(nn.Module):\n    '''A net.\n\n    Args:\n        a: first\n    '''\n"
        "    def __init__(self, a: int = 1, *, b: float = 2.0):\n        '''\n        :param b: second\n        '''\n"
    )
    for found in (by_source(tmp_path, text), imported(tmp_path, text)):
        assert found and found.meaning == "A net."
        assert [(one.name, one.default, one.help) for one in found.keys] == [("a", 1, "first"), ("b", 2.0, "second")]


def test_the_source_is_read_without_running_it(tmp_path: Path) -> None:
    assert read(tmp_path, f"raise SystemExit\n{nets.SMALL}").meaning == "A small classifier."


def test_another_content_is_read_again(tmp_path: Path) -> None:
    first, second = (read(tmp_path, f"def build(a: int = {n}): ...\n").keys[0].default for n in (1, 2))
    assert (first, second) == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build(width): ...", "required parameter width without annotation"),
        ("import torch\ndef build(x: torch.Tensor): ...", "required parameter x of type torch.Tensor, which no key"),
        ("def build(name: str): ...", "required parameter name, which is a key of every model"),
        ("def build(größe: int): ...", "required parameter größe, which is no name of a key"),
        ("def build(a, /): ...", "required parameter a without annotation"),
        ("def bild(a): ...", "has no build, it has bild -> model="),
        ("class Block:\n    def __init__(self, a): ...\ndef network(a=1): ...", "net.py:network"),
        ("build = 3", "is an int"),
        ("import torch\nbuild = torch.nn.Linear(2, 2)", "is a module that is built already"),
        ("import no_such_module", "raises ModuleNotFoundError when it is imported:"),
        ("def build(:", "raises SyntaxError when it is imported:"),
        ("import sys\nsys.exit(3)", "raises SystemExit when it is imported:"),
        ("raise ValueError('it is mine')", "ValueError: it is mine"),
    ],
)
def test_one_message_says_what_is_wrong(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the process says that imports the file; here, since it takes a second to start."""
    monkeypatch.setattr(signature, "_inspected", loaded_signature.of)
    with pytest.raises(CannotRun) as raised:
        read(tmp_path, f"{text}\n")
    assert len(raised.value.problems) == 1
    assert message in " ".join(str(raised.value).split())


@pytest.mark.usefixtures("commands")
def test_a_file_that_ends_its_process(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"ended\s+the\s+process\s+that\s+imports\s+it,\s+with\s+exit\s+code\s+7"):
        read(tmp_path, "import os\nos._exit(7)\n")


@pytest.mark.usefixtures("commands")
def test_a_traceback_is_the_users(tmp_path: Path) -> None:
    with pytest.raises(CannotRun) as raised:
        read(tmp_path, "def fail():\n    raise ValueError('it is mine')\n\n\nfail()\n")
    said = str(raised.value)
    files = [line.split('"')[1] for line in said.splitlines() if line.strip().startswith("File")]
    assert files == [f"{tmp_path}/net.py"] * 2 and "in fail" in said


@pytest.mark.usefixtures("commands")
def test_a_default_that_no_key_holds_stays(tmp_path: Path) -> None:
    found = read(tmp_path, "def build(name: str = 'x', norm=print, a: int = 1, *args, **others): ...\n")
    assert [one.name for one in found.keys] == ["a"]
