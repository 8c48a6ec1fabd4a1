"""Import the file of a user's model: whatever the user's code raises becomes one problem with its own traceback.

Only training processes, and the one that inspects a callable, import a user's file.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.core.problem import CannotRun, Fix, Problem
from harness.user_model import reference, sources
from harness.user_model.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
OURS = ("analysis", "engines", "harness", "models", "planners", "run", "slurm")
"""Modules of this project that a user's may not hide."""
HIDDEN = (f"{ROOT / 'harness'}/", "<frozen importlib", f"{sysconfig.get_path('purelib')}/torch/")
"""Where the frames are that a user need not see above his own."""


def load(place: Reference) -> Callable[..., Any]:
    """Return the callable of a reference; imports its file, once for each content. Raises CannotRun with what is wrong,
    in the user's code too."""
    return _load(place, sources.digest(place))


@lru_cache(maxsize=64)
def _load(place: Reference, digest: str) -> Callable[..., Any]:
    module = _module(place)
    found: Any = module
    for part in place.name.split("."):
        if not hasattr(found, part):
            raise CannotRun([_missing(place, module)])
        found = getattr(found, part)
    built = _is_built(found)
    if built or not callable(found):
        message = "is a module that is built already, each run makes its own" if built else f"is {_article(found)}"
        raise CannotRun([Problem("model", place.shown, message, hint="a function that makes the model and returns it")])
    return typing.cast(Callable[..., Any], found)


@contextmanager
def telling(place: Reference, when: str) -> Iterator[None]:
    """Raise CannotRun, with the user's own traceback, for whatever the user's code raises, `sys.exit` too."""
    try:
        yield
    except CannotRun:
        raise
    except (Exception, SystemExit) as error:
        raise CannotRun([cause(place.shown, error, when)]) from error


def cause(model: str, error: BaseException, when: str) -> Problem:
    """The problem that the user's code has raised an error, with its traceback."""
    lines = [f"raises {type(error).__name__} {when}:", *_traceback(error)]
    return Problem("model", model, "\n".join(lines), hint=_clash(error))


def _traceback(error: BaseException) -> list[str]:
    """The lines of a traceback from the first frame on that is neither this project's nor torch's, without those
    of this project at its end: a wrapper that refuses its arguments."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename.startswith(HIDDEN):
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error.with_traceback(trace), trace)
    while len(found.stack) > 1 and found.stack[-1].filename.startswith(HIDDEN[0]):
        found.stack.pop()
    return "".join(found.format()).rstrip().splitlines()


def _module(place: Reference) -> ModuleType:
    path = reference.find(place)
    root = Path(place.folder) if place.folder else sources.root_of(path)
    name = sources.module_of(path) if place.is_file else place.place
    from harness.capture import torchvision_import

    torchvision_import.prepare()
    with telling(place, "when it is imported"), _first(root):
        if "." not in name and place.is_file:
            return _from_file(path, place)
        top = name.partition(".")[0]
        if top in OURS and root != ROOT:
            raise CannotRun([_hides(place, f"{top} is a package of this project, too")])
        module = importlib.import_module(name)
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise CannotRun([_hides(place, f"{name} is {module.__file__} already")])
        return module


def _from_file(path: Path, place: Reference) -> ModuleType:
    """A file of no package, under a name that hides no other module."""
    name = f"user_model_{sources.digest(place)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first(root: Path) -> Iterator[None]:
    """Let modules next to the user's file be found first while it is imported; later, last."""
    for name in ("engines", "models", "planners"):
        importlib.import_module(name)  # the user's folder may have others of these names
    text = str(root)
    known = text in sys.path
    if not known:
        sys.path.insert(0, text)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if not known:
            sys.path.remove(text)
            sys.path.append(text)


def _hides(place: Reference, why: str) -> Problem:
    return Problem("model", place.shown, f"cannot be imported: {why}", hint="give the package another name")


def _clash(error: BaseException) -> str:
    """Advice for a user whose module has the name of one of ours, which is imported in its place, or who looks for our
    classes in the wrong one."""
    top = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if top == "harness":
        return "from harness import Classifier, or another class for models; a package of yours needs another name"
    return f"{top} is a package of this project: give yours another name" if top in OURS else ""


def _missing(place: Reference, module: ModuleType) -> Problem:
    names = [name for name, value in vars(module).items() if _is_offered(name, value, module)]
    complete = [name for name in names if _needs_nothing(vars(module)[name])]
    near = difflib.get_close_matches(place.name, names, n=1) or complete[:1] or names[:1]
    fixes: tuple[Fix, ...] = tuple({"model": f"{place.shown.removesuffix(place.name)}{name}"} for name in near)
    there = f"it has {', '.join(names[:8])}" if names else "nor any other function or class"
    return Problem("model", place.shown, f"has no {place.name}, {there}", fixes)


def _is_offered(name: str, value: object, module: ModuleType) -> bool:
    """A public function or class that is made in a module."""
    return not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__


def _needs_nothing(value: Callable[..., object]) -> bool:
    """Whether it can be called without arguments."""
    try:
        return all(one.default is not one.empty for one in parameters_of(value))
    except (TypeError, ValueError):  # it does not say
        return False


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters of a callable that take one argument each: without *args and **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]


def _is_built(value: object) -> bool:
    """Whether a value is an nn.Module, which can be called, too."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _article(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
