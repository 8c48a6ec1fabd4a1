"""The published cases: cases.csv, and which of them are held back from every fit.

llm-foundry   MPT, 125 million to 70 billion parameters, fully sharded, on A100 and H100: mosaicml/llm-foundry,
              scripts/train/benchmarking/README.md at 495218376 (2024-04-22), all rows but FP8; the models' shapes are
              in scripts/train/yamls/pretrain/mpt-*.yaml. Its "bf16" is mixed precision, too (mosaicml/composer#1761)
megatron      GPT, 1.7 billion to 1 trillion parameters, tensor and pipeline parallel, on A100: Narayanan et al., arXiv
              2104.04473, Table 1; micro-batch sizes are in NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh. And its
              Table 2, the same models by two schemes: PTD-P, and ZeRO-3, here fsdp

`tokens_s_device` is tokens/s of a device. Megatron's follow from its TFLOP/s by the paper's own formula (Sec. 5.1):
F = 96 B s l h^2 (1 + s / 6h + V / 16lh) with s = 2048 and V = 51,200.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pandas

SCHEMES = ("PTD-P", "ZeRO-3")
"""What publications compare; the last word of a case's name."""
FILE = Path(__file__).with_name("cases.csv")


def is_held_back(name: str) -> bool:
    """Whether no constant may be fitted to the case of this name: every second one, by a hash."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True)
class Case:
    """One published run; `micro_batch` is in samples, `micro_batches` are those of one replica in a step."""

    name: str
    publication: str
    gpu: str
    devices: int
    engine: str
    pipeline: int
    tensor: int
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    precision: str
    tokens_s_device: float

    @property
    def held_back(self) -> bool:
        """Whether no constant may be fitted to it."""
        return is_held_back(self.name)

    @property
    def is_fitted(self) -> bool:
        """Whether numbers are fitted to it."""
        return self.publication == "llm-foundry" and not self.held_back

    @property
    def compared(self) -> tuple[str, str] | None:
        """The model and the scheme, where the publication compares schemes."""
        *_, model, scheme = self.name.split()
        return (f"{self.publication} {model}", scheme) if scheme in SCHEMES else None

    @property
    def step_s(self) -> float:
        """Measured seconds of a step."""
        replicas = self.devices // (self.pipeline * self.tensor)
        tokens = self.sequence * self.micro_batch * self.micro_batches * replicas
        return tokens / (self.tokens_s_device * self.devices)


def load() -> list[Case]:
    """Returns all cases, in the order of the file."""
    return [Case(**row) for row in pandas.read_csv(FILE).to_dict("records")]
