"""Networks of transformers and torchvision: cuts at every block, two stages of nearly equal work."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.capture import inputs, split, verify
from harness.capture.torchvision_import import prepare
from tests.support.quick import within_s

prepare()
import torchvision  # noqa: E402
import transformers  # noqa: E402

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]
TOKENS = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
EXTRA = {
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def logits(result: Any) -> Any:
    return result.logits


def causal(family: str, **options: Any) -> Case:
    config = getattr(transformers, f"{family}Config")(**TOKENS, **EXTRA, **options)
    return getattr(transformers, f"{family}ForCausalLM")(config), (torch.randint(3, 64, (2, 8)),), {}, logits


def gpt2() -> Case:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=32, use_cache=False, **ends
    )
    return transformers.GPT2LMHeadModel(config), (torch.randint(64, (2, 8)),), {}, logits


def bert() -> Case:
    config = transformers.BertConfig(**TOKENS, **EXTRA)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    given = {"input_ids": torch.randint(3, 64, (2, 8)), "attention_mask": mask}
    return transformers.BertForMaskedLM(config), (), given, logits


def vit() -> Case:
    sizes = {"image_size": 16, "patch_size": 4, "num_labels": 5, "intermediate_size": 64}
    config = transformers.ViTConfig(**{k: v for k, v in TOKENS.items() if k != "vocab_size"}, **sizes)
    return transformers.ViTForImageClassification(config), (torch.randn(2, 3, 16, 16),), {}, logits


def t5() -> Case:
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=4, num_heads=2, vocab_size=64, use_cache=False
    )
    given = {"input_ids": torch.randint(64, (2, 8)), "decoder_input_ids": torch.randint(64, (2, 6))}
    return transformers.T5ForConditionalGeneration(config), (), given, logits


def images(name: str) -> Case:
    return getattr(torchvision.models, name)(num_classes=7), (torch.randn(2, 3, 64, 64),), {}, None


CASES: dict[str, tuple[Callable[[], Case], str, int]] = {
    "llama": (lambda: causal("Llama", num_key_value_heads=2, use_cache=False), "LlamaDecoderLayer", 4),
    "gpt2": (gpt2, "GPT2Block", 4),
    "bert": (bert, "BertLayer", 4),
    "vit": (vit, "ViTLayer", 4),
    "t5": (t5, "T5Block", 8),
    "mixtral": (
        lambda: causal(
            "Mixtral",
            num_key_value_heads=2,
            num_local_experts=4,
            use_cache=False,
            experts_implementation="eager",
        ),
        "MixtralDecoderLayer",
        4,
    ),
    "llama with a cache": (lambda: causal("Llama", num_key_value_heads=2), "", 4),
    "resnet50": (lambda: images("resnet50"), "Bottleneck", 16),
    "densenet121": (lambda: images("densenet121"), "_DenseLayer", 58),
    "swin_t": (lambda: images("swin_t"), "SwinTransformerBlock", 12),
    "efficientnet_b0": (lambda: images("efficientnet_b0"), "MBConv", 16),
    "convnext_tiny": (lambda: images("convnext_tiny"), "CNBlock", 18),
}
LARGE = ("densenet121", "swin_t", "convnext_tiny", "efficientnet_b0")


@pytest.mark.usefixtures("computation", "at_length")
@pytest.mark.parametrize("name", [name for name in CASES if name not in LARGE])
def test_a_network_of_a_library(name: str) -> None:
    split_and_verified(name)


@pytest.mark.usefixtures("at_length")
@pytest.mark.parametrize("name", LARGE)
def test_a_large_network_of_a_library(name: str) -> None:
    split_and_verified(name)


def split_and_verified(name: str) -> None:
    torch.manual_seed(0)
    make, block, count = CASES[name]
    module, args, kwargs, select = make()
    chain = split(module, args, kwargs, select)
    verify(module, chain, args, kwargs, select)
    blocks = [sum(type(m).__name__ == block for m in layer.modules()) for layer in chain]
    opened = count - sum(blocks)
    assert len(chain) > count and max(blocks) <= 1 and (opened <= 1 or not block)
    assert two_stages(chain, inputs(args, kwargs)) < 1.2


def two_stages(chain: nn.Sequential, value: Any) -> float:
    """The FLOPs of the slower of two stages, cut as well as the layers allow, over the mean."""
    flops = []
    for layer in chain:
        with FlopCounterMode(display=False) as counter:
            value = layer(value)
        flops.append(counter.get_total_flops())
    total = sum(flops)
    slower = (max(sum(flops[:place]), total - sum(flops[:place])) for place in range(len(flops)))
    return min(slower) / total * 2


@pytest.mark.usefixtures("computation")
def test_32_layers_of_a_large_llama_are_split_in_seconds_without_memory() -> None:
    """7 billion weights on the meta device."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, use_cache=False
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chain = within_s(20, lambda: split(module, (torch.zeros(1, 2048, dtype=torch.long),), {}, logits))
    assert len(chain) >= 34
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB
