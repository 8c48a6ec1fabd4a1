"""What only a rank can find out before it starts."""

from __future__ import annotations

import pytest

from harness.problem import CannotRun
from harness.rank import check_size
from models.unet.config import Config
from models.unet.unet import UNet


def test_a_model_that_does_not_fit_is_not_profiled() -> None:
    """U-Net (2, 16) has 4,519,160 parameters: 36 MB for weights and gradients in float32."""
    model = UNet(Config())
    check_size(model, "float32", 4_519_160 * 8)
    with pytest.raises(CannotRun, match=r"model unet_2_16_128 +needs 34.5 MiB to be profiled"):
        check_size(model, "float32", 4_519_160 * 8 - 1)
