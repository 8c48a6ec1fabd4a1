"""A user's file: networks of torchvision and transformers as they are, and an LSTM, each in a wrapper of its task.

Images are small. There is no dropout, so that a plain loop has the same losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torchvision.ops import StochasticDepth

from harness import Classifier, Custom, LanguageModel

CLASSES, SIDE = 10, 64
VOCABULARY, SEQUENCE = 128, 16
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": SEQUENCE, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def _images(name: str, side: int = SIDE, **options: Any) -> Classifier:
    module = getattr(torchvision.models, name)(num_classes=CLASSES, **options)
    return Classifier(_without_dropout(module), (3, side, side), CLASSES)


def _without_dropout(module: nn.Module) -> nn.Module:
    """Also without stochastic depth."""
    for one in module.modules():
        if isinstance(one, nn.Dropout | StochasticDepth):
            one.p = 0.0
    return module


def resnet50() -> Classifier:
    """Residuals begin as zero (Goyal et al., 2017): otherwise its gradients are rounding errors in float32."""
    return _images("resnet50", zero_init_residual=True)


def densenet121() -> Classifier:
    return _images("densenet121")


def swin_t() -> Classifier:
    return _images("swin_t")


def efficientnet_b0() -> Classifier:
    return _images("efficientnet_b0")


def convnext_tiny() -> Classifier:
    return _images("convnext_tiny")


class LSTMLanguageModel(nn.Module):
    """Layers of LSTM between an embedding and a head (Zaremba et al., 2014), one module each."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.embedding(tokens)
        for layer in self.layers:
            value, _ = layer(value)
        logits: Tensor = self.head(value)
        return logits


def lstm() -> LanguageModel:
    return LanguageModel(LSTMLanguageModel(), VOCABULARY, SEQUENCE)


def vit_b_16() -> Classifier:
    return _images("vit_b_16", image_size=SIDE)


def mobilenet_v3_small() -> Classifier:
    return _images("mobilenet_v3_small")


def regnet_y_400mf() -> Classifier:
    return _images("regnet_y_400mf")


def googlenet() -> Custom:
    """Two further classifiers in the middle count 0.3 each (Szegedy et al., 2015)."""
    module = torchvision.models.googlenet(num_classes=CLASSES, init_weights=False)

    def loss(output: Any, target: Tensor) -> Tensor:
        each = [functional.cross_entropy(logits, target, reduction="none") for logits in output]
        return each[0] + 0.3 * (each[1] + each[2])

    return Custom(_without_dropout(module), (torch.randn(8, 3, SIDE, SIDE), torch.randint(CLASSES, (8,))), loss)


def fcn_resnet50() -> Custom:
    """Segmentation with a dictionary as result."""
    module = torchvision.models.segmentation.fcn_resnet50(weights_backbone=None, num_classes=CLASSES)

    def loss(output: Any, target: Tensor) -> Tensor:
        return functional.cross_entropy(output["out"], target, reduction="none").mean((1, 2))

    return Custom(
        _without_dropout(module), (torch.randn(8, 3, SIDE, SIDE), torch.randint(CLASSES, (8, SIDE, SIDE))), loss
    )


def distilbert() -> LanguageModel:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=64, n_layers=4, n_heads=4, hidden_dim=128, max_position_embeddings=SEQUENCE,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return LanguageModel(transformers.DistilBertForMaskedLM(config), VOCABULARY, SEQUENCE)


def opt() -> LanguageModel:
    config = transformers.OPTConfig(**TEXT, ffn_dim=128, word_embed_proj_dim=64, dropout=0.0)
    return LanguageModel(transformers.OPTForCausalLM(config), VOCABULARY, SEQUENCE)


def qwen2() -> LanguageModel:
    config = transformers.Qwen2Config(**TEXT, num_key_value_heads=2)
    return LanguageModel(transformers.Qwen2ForCausalLM(config), VOCABULARY, SEQUENCE)


def gemma() -> LanguageModel:
    config = transformers.GemmaConfig(**TEXT, num_key_value_heads=2, head_dim=16)
    return LanguageModel(transformers.GemmaForCausalLM(config), VOCABULARY, SEQUENCE)
