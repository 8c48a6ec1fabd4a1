"""Lets torchvision be imported where its compiled operators belong to another build of torch.

PyPI's torchvision is built for the torch with CUDA: next to a torch without CUDA its import fails, and with it that of
transformers. Its networks need no compiled operator. Importing this module imports torch, but not torchvision.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def prepare() -> None:
    """Called before the first import of torchvision or transformers: declares the operators whose absence stops it."""
    found = importlib.util.find_spec("torchvision")
    if _declared or found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)
