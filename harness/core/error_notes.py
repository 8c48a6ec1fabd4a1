"""Notes of an error that say where it happened.

Whoever handles an error further out adds no second note of a kind; other notes of Python are plain texts.
"""

from __future__ import annotations


class StageNote(str):
    """In which stage it happened: "in stage 1, layer 'conv', micro-batch 3"."""


class RankNote(str):
    """In which rank it happened: "in rank 2, stage 1, in the forward pass of micro-batch 3"."""


def has_note(error: BaseException, kind: type[str]) -> bool:
    """Returns whether an error has a note of a kind."""
    return any(isinstance(note, kind) for note in getattr(error, "__notes__", ()))
