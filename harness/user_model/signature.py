"""The parameters of a user's callable, which become keys. Does not import torch, nor the user's file.

read(reference)    by its source (`literal_signature`), if annotations and defaults are literals and the name is bound
                   once: 1 ms
                   else by a process that imports the file (`inspect_callable`, `loaded_signature`): as long as that
                   takes, a second or two with torch

There are two because neither is enough: `--help`, each command and each point of a sweep read the signature, and an
import of torch for that is longer than all else that they do; and what a decorator, an imported name or a computed
default is, only an import says. Both give the same for what both can read (tests/harness/user_model/test_signature.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from harness.core.problem import CannotRun, Problem, refuse
from harness.core.serialization import SchemaError
from harness.user_model import literal_signature, reference, sources
from harness.user_model.parameters import RESERVED, Parameter, Signature
from harness.user_model.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
IMPORT_S = 300.0
"""The longest time that importing a user's file may take."""


def read(place: Reference) -> Signature:
    """The signature of what a reference names. Raises CannotRun for what is not there, cannot be imported or cannot be
    called, and for required parameters that can be no key."""
    found = _read(place, sources.digest(place))
    refuse(found.problems)
    refuse([_no_key(place, one) for one in found.parameters if one.required and not one.is_key])
    return found


@lru_cache(maxsize=64)
def _read(place: Reference, digest: str) -> Signature:
    path = reference.find(place)
    return literal_signature.of(path, place.name) or _inspected(place)


def _inspected(place: Reference) -> Signature:
    """What a process finds that imports the user's file: what that prints, and whatever it changes, stays there."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "signature.json"
        command = [sys.executable, "-P", "-m", "harness.user_model.inspect_callable", place.text, str(answer)]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=os.environ | {"PYTHONPATH": path},
                timeout=IMPORT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise CannotRun([Problem("model", place.shown, f"is not imported after {IMPORT_S:.0f} s")]) from error
        try:
            return Signature.load(answer)
        except (OSError, SchemaError) as error:
            lines = done.stderr.decode(errors="replace").splitlines()[-20:]
            message = "\n".join([f"ended the process that imports it, with exit code {done.returncode}", *lines])
            raise CannotRun([Problem("model", place.shown, message)]) from error


def _no_key(place: Reference, one: Parameter) -> Problem:
    """Why a parameter that has no default cannot be given either."""
    if one.name in RESERVED or not one.name.isascii():
        why = "is a key of every model" if one.name in RESERVED else "is no name of a key: only ASCII letters are"
        return Problem("model", place.shown, f"has a required parameter {one.name}, which {why}", hint="rename it")
    subject = f"has a required parameter {one.name} "
    if not one.annotation:
        hint = f"{one.name}: int, or another type, where it is defined; or a default: {one.name}=1"
        return Problem("model", place.shown, f"{subject}without annotation: which values may it have?", hint=hint)
    hint = f"a default for {one.name}, or int, float, bool, str, Literal, Optional or a list of these"
    message = f"{subject}of type {one.annotation}, which no key can have"
    return Problem("model", place.shown, message, hint=hint)
