"""Files of a user's own, as text."""

from __future__ import annotations

from pathlib import Path

SMALL = '''\
from typing import Literal, Optional

from torch import nn


def build(width: int = 8, act: Literal["relu", "gelu"] = "relu", scale: Optional[float] = None):
    """A small classifier.

    Args:
        width: Numbers of its hidden layer.
        act: The activation.
    """
    return nn.Sequential(nn.Linear(4, width), nn.ReLU() if act == "relu" else nn.GELU(), nn.Linear(width, 3))
'''
WRAPPED = '''\
from torch import nn

from harness import Classifier


def build(width: int = 8):
    """A small classifier that says what it is trained on."""
    layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))
    return Classifier(layers, input_shape=(4,), classes=3)
'''
MASKED = """\
import torch
from torch import nn

from harness import Custom


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, batch, *, hidden, weights, scale=1.0, extra=None):
        x = self.embedding(batch["words"]) + batch["numbers"][:, None]
        x = x.masked_fill(hidden[..., None], 0.0)
        for part in self.parts:
            x = torch.tanh(part(x)) * weights[:, None]
        return {"all": scale * x, "first": x[:, 0]}


def loss(output, target):
    return (output["all"].mean(1) - target).square().sum(1) + output["first"].abs().sum(1)


def build(samples: int = 6):
    torch.manual_seed(1)
    words, numbers = torch.randint(7, (samples, 5)), torch.randn(samples, 4)
    inputs = {
        "batch": {"words": words, "numbers": numbers},
        "hidden": words == 3, "weights": torch.arange(5.0), "scale": 0.5, "extra": None,
    }
    return Custom(Net(), (inputs, torch.randn(samples, 4)), loss)
"""
BRANCH = """\
from torch import nn

from harness import Classifier


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.ways = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        x = self.first(x)
        if x.sum() > 0:
            return self.last(self.ways[0](x))
        return self.last(self.ways[1](x))


def build():
    return Classifier(Net(), input_shape=(4,), classes=3)
"""
"""A network that takes one of two ways, by the values of its input."""
STATEFUL = """\
import random

import torch
from torch import nn

from harness import Classifier


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.register_buffer("scale", torch.ones(8))
        self.passes, self.latest, self.ready = 0, [], False

    def forward(self, x):
        if not self.ready:
            self.offset, self.ready = x.mean().item(), True
        self.passes += 1
        self.latest.append(random.random())
        x = torch.tanh(self.first(x) + self.offset)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.scale.mul_(0.5).add_(0.5 * x.detach().abs().mean(0))
        return self.last((x - self.mean) / self.scale) * (1 + 0.1 * (self.passes % 3)) + sum(self.latest[-2:])


def build():
    return Classifier(Net(), input_shape=(4,), classes=3)
"""
"""A network that computes with what its passes leave in attributes and buffers, and with Python's random numbers."""
KEYS = ("model.task=classification", "model.input=[4]", "model.classes=3")
"""What a plain module of `SMALL` needs."""


def write(folder: Path, text: str = SMALL, name: str = "net.py") -> str:
    """The reference of `build` in a new file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return f"{folder / name}:build"
