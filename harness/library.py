"""Race, plan and simulate from a script or a notebook: `from harness import race, plan, simulate`.

    records = race(module, (inputs, targets), engine=["gpipe", "ddp"], mesh={"pipeline": 2}, steps=5)

    module, batch      a file that `model=` names                    harness.user_model.saved
    keys               the overrides of run.py                       harness.cli.keywords
    all of these       a sweep, and the records of its points        harness.sweep
                       a race, and the records of its entries        harness.races

Each returns a record for each point, in order; one that cannot run has the status "infeasible". Runs are started as
`python run.py` starts them: nothing of the caller's program is run again. Does not import torch.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import keywords
from harness.core.problem import CannotRun, Problem, bare_key
from harness.core.record import EXIT_CODES, RunRecord
from harness.races.race import hold
from harness.report.console import silent
from harness.run.run_folder import new_id
from harness.sweep import local
from harness.sweep.points import value_of
from harness.user_model import reference, saved

if TYPE_CHECKING:
    from torch import Tensor

    from harness.interfaces import Batch

    Given = Batch | tuple[Any, Any] | str | None
    Loss = Callable[[Any, Any], Tensor] | None

MODULES = Path("runs", "modules")
PREEMPTED = EXIT_CODES["preempted"]
UNSAVED = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)
"""What pickle raises for an object that no other process can have."""


def race(
    model: Any,
    batch: Given = None,
    /,
    *overrides: str,
    loss: Loss = None,
    turns: bool = False,
    show: bool = False,
    **keys: Any,
) -> list[RunRecord]:
    """Train the model with every combination of the keys, each run in processes of its own; returns their records.

    Runs go one after the other, as with `python run.py -m`. With `turns` those of one race, which differ in the engine,
    train at the same time, in turns, until it is known which one is faster, as with `mode=race`: `steps` are the rounds
    then, and race.json in the folder has ranks and intervals.

    `model` is

    * an `nn.Module`, with its weights, which stay as they are; trained on the samples of `batch`, (inputs, targets) of
      n samples each, over and over, for what `loss(output, targets)` says: one number for each sample, or their sum.
      Without a loss: targets of whole numbers are classes or tokens (cross entropy), others are numbers (squared
      error);
    * a wrapper (`Classifier`, `LanguageModel`, `Regression`, `Custom`), on samples of its own or on those of `batch`;
    * an object with the whole interface of a model;
    * a text, what `model=` takes on the command line: "gpt", "net.py:build".

    Keys are those of `python run.py --help all`: as texts, "engine.checkpoint=always", after the batch or in its place,
    or by name, `steps=5`, `mesh={"pipeline": 2}`, `engine=["gpipe", "ddp"]` (`harness.cli.keywords`). `batch.size` is
    the number of samples of `batch` unless it is given. Files are written to `out`, by default to runs/ID; runs that
    are in `out` and ended well are not run again. `show` prints the table of a sweep.

    Raises CannotRun, with all problems at once, for arguments that no run takes and for keys that do not exist.
    """
    return _records("race" if turns else "run", model, batch, overrides, loss, show, keys)


def plan(
    model: Any, batch: Given = None, /, *overrides: str, loss: Loss = None, show: bool = False, **keys: Any
) -> list[RunRecord]:
    """Plan the runs that `race` would train, and predict them: arguments and errors are those of `race`.

    A record has the plan (`Plan.from_json(record.plan)`) and in `predicted` the figures: seconds, bytes, samples/s.
    """
    return _records("plan", model, batch, overrides, loss, show, keys)


def simulate(
    model: Any, batch: Given = None, /, *overrides: str, loss: Loss = None, show: bool = False, **keys: Any
) -> list[RunRecord]:
    """Simulate a step of the runs that `race` would train: arguments and errors are those of `race`.

    A record has in `metrics` the figures, named as those of a run that is measured. `record.trace` is the file of the
    timeline, in the folder `record.config["out"]`: harness.core.trace.Trace loads it.
    """
    return _records("simulate", model, batch, overrides, loss, show, keys)


def _records(
    mode: str,
    model: Any,
    batch: Given,
    overrides: Sequence[str],
    loss: Loss,
    show: bool,
    keys: Mapping[str, Any],
) -> list[RunRecord]:
    if isinstance(batch, str):
        overrides, batch = [batch, *overrides], None
    texts = [*reference.typed(overrides), *keywords.overrides(keys)]
    _refuse_keys_of_arguments(texts)
    texts = [*_model(mode, model, batch, loss, texts), *texts, f"mode={mode}"]
    folder, console = Path("runs", new_id(texts)).absolute(), None if show else silent()
    if mode == "race":
        held = hold(texts, several=True, out=folder, console=console)
        rows, whole = [one.row for _, result in held for one in result.entered], PREEMPTED not in dict(held)
    else:
        rows = local.rows_of(texts)
        whole = local.run_all(rows, Path(value_of(texts, "out") or folder).absolute(), console)
    if not whole:
        raise KeyboardInterrupt("what has ended has its record in the folder")
    return [row.record for row in rows if row.record]


def _refuse_keys_of_arguments(texts: Sequence[str]) -> None:
    """What the function and its first argument say is not given as a key, too."""
    problems = []
    for text in texts:
        key, value = bare_key(text), text.partition("=")[2]
        if key == "mode":
            problems.append(Problem(key, value, "is the name of the function", hint="race, plan or simulate"))
        if key == "model":
            problems.append(Problem(key, value, "is the first argument", hint=f"race({value!r}, ...)"))
    if problems:
        raise CannotRun(problems)


def _model(mode: str, model: Any, batch: Given, loss: Loss, texts: Sequence[str]) -> list[str]:
    """The overrides that name the model; of an object, which is saved for that."""
    if isinstance(model, str | os.PathLike):
        given = [name for name, one in (("batch", batch), ("loss", loss)) if one is not None]
        message = f"is given, and {model} has samples and a loss of its own"
        if given:
            raise CannotRun([Problem(name, None, message, hint="the module itself in its place") for name in given])
        return reference.typed([f"model={os.fspath(model)}"])
    from harness.user_model.on_batch import on_batch

    keys = {bare_key(text) for text in texts}
    taken = on_batch(model, batch, loss, named="model.task" in keys)
    module = getattr(taken, "module", taken)
    name = type(module).__name__
    if mode in ("run", "race") and any(one.is_meta for one in getattr(module, "parameters", list)()):
        message = "has weights on the meta device, without values"
        raise CannotRun([Problem("model", name, message, hint="harness.plan or harness.simulate needs none")])
    try:
        place = saved.save(taken, name, MODULES)
    except OSError as error:
        message = f"cannot be written: {error.strerror}"
        raise CannotRun([Problem(str(MODULES), None, message, hint="another working directory")]) from error
    except UNSAVED as error:
        message = f"cannot be saved for the processes that train: {type(error).__name__}: {error}"
        raise CannotRun([Problem("model", name, message)]) from error
    size = [f"batch.size={len(taken.example)}"] if batch is not None and "batch.size" not in keys else []
    return [*reference.typed([f"model={place.text}"]), *size]
