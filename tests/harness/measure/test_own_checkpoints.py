"""What a layer's backward pass needs that recomputes a part of the layer itself."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.measure.count_model import count
from harness.tasks import Classification

SAMPLES, WIDTH, INNER = 2, 4, 16


class Kept(nn.Module):
    """Keeps its input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, x, use_reentrant=False)
        return x + y


class Net(Classification):
    name, input_shape, classes = "net", (WIDTH,), WIDTH

    def layers(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Kept(), nn.Linear(WIDTH, WIDTH))


def test_what_is_recomputed_is_there_in_the_backward_pass_alone() -> None:
    """The input of GELU and its output."""
    layers = count(Net(), SAMPLES, "float64").layers
    assert [layer.working_bytes for layer in layers] == [0, 2 * SAMPLES * INNER * 8, 0]
    assert layers[1].saved_bytes == SAMPLES * WIDTH * 8
