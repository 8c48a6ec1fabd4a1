"""The models and the engines of the page, as keys of a run, and the block that repeats in each model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NETS = Path(__file__).with_name("nets.py")
BATCH, MICRO_BATCH, STEPS, SEED = 8, 2, 3, 0
SETTINGS = (
    f"batch.size={BATCH}", "warmup=1", f"steps={STEPS - 1}", f"seed={SEED}", "tracker=none",
    "cluster.devices=2",
)  # fmt: skip
DTYPES = {"fp64": "float64", "fp32": "float32"}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
"""How much losses may differ, relative to those of the plain loop."""
COMPARED = {"fp64": STEPS, "fp32": 2}
"""How many steps are compared: at the third one, networks with batch norm make of a rounding error in float32 more than
the tolerance, whoever computes them."""


@dataclass(frozen=True)
class Case:
    """A model: `config` is one of models/hf/configs, None for a function of nets.py. `block` is the class of the
    modules that repeat; `further` cases have the engines of `FEW` alone. A large `lr` multiplies rounding errors."""

    name: str
    block: str
    config: str | None = None
    overrides: str = ""
    further: bool = False
    lr: float = 0.05

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that choose it."""
        if self.config is None:
            return (f"model={NETS}:{self.name}",)
        changed = (f"model.overrides={{{self.overrides}}}",) if self.overrides else ()
        return ("model=hf", f"model.config={self.config}", "model.sequence=16", *changed)


@dataclass(frozen=True)
class Column:
    """An engine with a mesh of two devices, all with micro-batches of two samples."""

    name: str
    keys: tuple[str, ...]
    precision: str = "fp64"

    @property
    def replicas(self) -> int:
        return 2 if "mesh.data=2" in self.keys else 1

    def overrides(self, case: Case) -> list[str]:
        """All keys of a cell."""
        micro_batches = f"batch.micro_batches={BATCH // self.replicas // MICRO_BATCH}"
        own = (micro_batches, f"optimizer.lr={case.lr}", f"precision={self.precision}")
        return [*case.keys, *self.keys, *SETTINGS, *own]


CASES = (
    Case("llama", "LlamaDecoderLayer", "llama_small"),
    Case("gpt2", "GPT2Block", "gpt2_small", "resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0"),
    Case("bert", "BertLayer", "bert_small", "hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0"),
    Case("vit", "ViTLayer", "vit_small"),
    Case("t5", "T5Block", "t5_small", "dropout_rate: 0.0"),
    Case("mixtral", "MixtralDecoderLayer", "mixtral_small"),
    Case("resnet50", "Bottleneck"),
    Case("densenet121", "_DenseLayer"),
    Case("swin_t", "SwinTransformerBlock"),
    Case("efficientnet_b0", "MBConv", lr=0.001),
    Case("convnext_tiny", "CNBlock"),
    Case("lstm", "LSTM"),
    Case("googlenet", "Inception", further=True),
    Case("vit_b_16", "EncoderBlock", further=True),
    Case("mobilenet_v3_small", "InvertedResidual", further=True),
    Case("regnet_y_400mf", "ResBottleneckBlock", further=True),
    Case("fcn_resnet50", "Bottleneck", further=True),
    Case("distilbert", "TransformerBlock", further=True),
    Case("opt", "OPTDecoderLayer", further=True),
    Case("qwen2", "Qwen2DecoderLayer", further=True),
    Case("gemma", "GemmaDecoderLayer", further=True),
)
COLUMNS = (
    Column("single", ("engine=single",)),
    Column("gpipe", ("engine=gpipe", "mesh.pipeline=2")),
    Column("1F1B", ("engine=torch_pipelining", "engine.schedule=1f1b", "mesh.pipeline=2")),
    Column("ZB-V", ("engine=pipeline", "engine.schedule=zbv", "mesh.pipeline=2")),
    Column("myelin", ("engine=myelin", "mesh.pipeline=2", "mesh.data=1")),
    Column("ddp", ("engine=ddp", "mesh.data=2")),
    Column("fsdp", ("engine=fsdp", "mesh.data=2")),
    Column("deepspeed", ("engine=deepspeed", "mesh.pipeline=2", "mesh.data=1")),
    Column("ZeRO 2", ("engine=deepspeed", "engine.zero=2", "mesh.data=2"), "fp32"),
)
FEW = ("gpipe", "ddp", "fsdp")


def cells() -> list[tuple[Case, Column]]:
    """All cells of the page, row by row."""
    return [(case, column) for case in CASES for column in COLUMNS if not case.further or column.name in FEW]
