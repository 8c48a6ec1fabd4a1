"""The common base of all image classifiers of the zoo."""

from __future__ import annotations

from harness.tasks import Classification


class ClassificationModel(Classification):
    """Assigns a sample of `input_shape` to one of `classes`. Implements `harness.interfaces.Model` but for `layers`."""

    def __init__(self, name: str, input_shape: tuple[int, ...], classes: int) -> None:
        self.name = name
        self.input_shape = input_shape
        self.classes = classes
