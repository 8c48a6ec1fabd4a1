"""What other frameworks call the keys and engines of this project, and how their values are said here.

    micro_batch_size=2         samples of a micro-batch     batch.micro_batch_size=2
    engine.balance=[54,55]     torchgpipe's                 planner=given planner.balance=[54,55]
    engine=zero3               an engine elsewhere          engine=deepspeed engine.zero=3

`harness.cli.suggestions` tries what is meant before it is suggested. docs/key_pages.py makes a page of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from harness.config import registry
from harness.core.problem import Fix


@dataclass(frozen=True)
class Meant:
    """What was probably meant: `fixes` to try in turn, the first that works counts; `hint` where there are none."""

    fixes: tuple[Fix, ...] = ()
    hint: str = ""


@dataclass(frozen=True)
class Row:
    """One thing: its `names` in `frameworks`, where it is called so, and the `key` that it has here.

    `engines` are the further overrides to try, one after the other, where the chosen engine does not have the key.
    `translate(value, config)` says what a value means here; without it the key takes the value as it is.
    `note` says in the documentation how it does. `models` are those that have another key for it.
    """

    names: tuple[str, ...]
    frameworks: str
    meaning: str
    key: str
    engines: tuple[Fix, ...] = ()
    translate: Callable[[Any, DictConfig], Meant] | None = None
    note: str = ""
    models: tuple[tuple[str, str], ...] = ()

    def key_of(self, model: str) -> str:
        """The key that it has with a model."""
        return dict(self.models).get(model, self.key)

    def meant(self, value: Any, config: DictConfig) -> Meant:
        """What `name=value` means for a configuration, whose engine, batch and mesh count."""
        if self.translate is not None:
            return self.translate(value, config)
        key = self.key_of(config.model.name)
        return Meant(tuple(engine | {key: value} for engine in ({}, *self.engines)))


def _shards(size: Any, config: DictConfig) -> Meant:
    """The tensor parallel size, with a planner that splits matmuls."""
    splitting: Fix = {} if registry.splits_matmuls(config.planner.name) else {"planner": "megatron"}
    return Meant((splitting | {"mesh.tensor": size},))


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _devices(count: Any, config: DictConfig) -> Meant:
    """The devices of each node, if all nodes have `count`."""
    nodes = config.cluster.nodes or 1
    if not _is_count(count):
        return Meant(hint="cluster.devices=...")
    if count % nodes:
        return Meant(
            hint=f"a number that divides by cluster.nodes, {count} devices are not equally many on {nodes} nodes"
        )
    return Meant(({"cluster.devices": count // nodes},))


ROWS = (
    Row(
        ("zero", "zero_stage", "zero_optimization.stage"),
        "DeepSpeed",
        "ZeRO stage",
        "engine.zero",
        translate=lambda value, config: Meant(({"engine": "deepspeed", "engine.zero": value},)),
        note="with `engine=deepspeed`",
    ),
    Row(
        ("balance",),
        "torchgpipe",
        "number of layers of each stage",
        "planner.balance",
        translate=lambda value, config: Meant(({"planner": "given", "planner.balance": value},)),
        note="with `planner=given`",
    ),
    Row(
        ("batch_size", "global_batch_size", "train_batch_size"),
        "PyTorch, Megatron-LM, DeepSpeed",
        "samples of a step, here over all replicas",
        "batch.size",
    ),
    Row(
        ("tensor_model_parallel_size", "tensor_parallel_size", "model_parallel_size", "tp_size", "tp"),
        "Megatron-LM, DeepSpeed",
        "tensor parallel size",
        "mesh.tensor",
        translate=_shards,
        note="with a planner that splits matmuls, such as `planner=megatron`",
    ),
    Row(
        ("pipeline_model_parallel_size", "pipeline_parallel_size", "pp_size", "pp", "num_stages", "stages"),
        "Megatron-LM, DeepSpeed, torch.distributed.pipelining",
        "pipeline parallel size",
        "mesh.pipeline",
        ({"engine": "gpipe"}, {"engine": "torch_pipelining"}),
    ),
    Row(
        ("data_parallel_size", "dp_size", "dp", "num_replicas", "replicas"),
        "Megatron-LM, PyTorch",
        "data parallel size",
        "mesh.data",
        ({"engine": "ddp"}, {"engine": "torch_pipelining"}),
    ),
    Row(
        ("chunks", "n_microbatches", "num_microbatches", "num_micro_batches", "gradient_accumulation_steps"),
        "torchgpipe, torch.distributed.pipelining, DeepSpeed",
        "number of micro-batches",
        "batch.micro_batches",
    ),
    Row(
        ("micro_batch_size", "train_micro_batch_size_per_gpu", "microbatch_size"),
        "Megatron-LM, DeepSpeed",
        "samples of a micro-batch",
        "batch.micro_batch_size",
    ),
    Row(("lr", "learning_rate"), "PyTorch", "learning rate", "optimizer.lr"),
    Row(
        ("world_size", "num_gpus", "n_gpus", "ngpus", "gpus"),
        "PyTorch, DeepSpeed",
        "number of devices, here of each node",
        "cluster.devices",
        translate=_devices,
        note="divided by `cluster.nodes`",
    ),
    Row(("nproc_per_node", "gpus_per_node"), "torchrun", "processes of each node", "cluster.devices"),
    Row(("nnodes", "num_nodes"), "torchrun, DeepSpeed", "number of nodes", "cluster.nodes"),
    Row(("train_iters", "max_steps", "num_steps"), "Megatron-LM, PyTorch", "number of training steps", "steps"),
    Row(("num_layers", "num_hidden_layers", "n_layers", "n_layer"), "Megatron-LM", "number of layers", "model.layers"),
    Row(
        ("hidden_size", "d_model", "n_embd"),
        "Megatron-LM",
        "hidden size",
        "model.hidden",
        note="`model.width` with `model=llama`",
        models=(("llama", "model.width"),),
    ),
    Row(
        ("num_attention_heads", "num_heads", "n_heads", "n_head"),
        "Megatron-LM",
        "number of attention heads",
        "model.heads",
    ),
    Row(
        ("num_query_groups", "num_key_value_heads", "n_kv_heads"),
        "Megatron-LM, Llama",
        "number of heads of keys and values",
        "model.kv_heads",
    ),
    Row(("seq_length", "seq_len", "block_size"), "Megatron-LM", "tokens of a sample", "model.sequence"),
    Row(("vocab_size", "padded_vocab_size"), "Megatron-LM", "number of different tokens", "model.vocabulary"),
    Row(("num_classes",), "torchvision", "number of classes", "model.classes"),
    Row(("image_size", "img_size"), "torchvision", "pixels of an image's side", "model.size"),
)
"""In the order in which they are understood: what chooses an engine before what must fit it, the size of a micro-batch
after those of the batch and of the mesh."""


def _scheduled(name: str) -> tuple[Fix, ...]:
    return tuple({"engine": engine, "engine.schedule": name} for engine in ("pipeline", "torch_pipelining"))


ENGINES: dict[tuple[str, ...], tuple[Fix, ...]] = {
    ("zero",): tuple({"engine": "deepspeed", "engine.zero": stage} for stage in (1, 2, 3)),
    **{(f"zero{stage}",): ({"engine": "deepspeed", "engine.zero": stage},) for stage in (1, 2, 3)},
    ("dp", "data_parallel"): ({"engine": "ddp"},),
    ("pp", "pipeline_parallel"): ({"engine": "pipeline"}, {"engine": "gpipe"}),
    ("tp", "tensor_parallel", "megatron", "megatron_lm"): ({"engine": "sbp", "planner": "megatron"},),
    ("1f1b", "pipedream_flush"): _scheduled("1f1b"),
    ("interleaved", "interleaved_1f1b"): _scheduled("interleaved1f1b"),
    ("zb", "zbv", "zero_bubble"): _scheduled("zbv"),
    ("pipedream_2bw",): ({"engine": "periodic", "planner": "pipedream"},),
    ("pipedream",): ({"engine": "periodic", "planner": "pipedream", "engine.versions": "stash"},),
    ("pipemare",): ({"engine": "periodic", "planner": "contiguous", "engine.versions": "none"},),
    ("axonn",): ({"engine": "myelin"},),
}
"""What is an engine, or a scheme, elsewhere, and what it is here. Signs between letters do not count: ZeRO-3."""


def row(key: str, groups: Iterable[str]) -> Row | None:
    """The row of a key that does not exist: of the whole key, or of its last part after one of the `groups`.

    None for the key of the row itself, which another choice of the group has: engine.zero with engine=single.
    """
    group, _, last = key.partition(".")
    wanted = {key} | ({last} if group in groups else set())
    found = (row for row in ROWS if wanted & {*row.names})
    return next((row for row in found if key != row.key), None)


def engine(name: str) -> tuple[Fix, ...]:
    """What an engine's name that does not exist means here; () if nothing is known."""
    said = _letters(name)
    return next((fixes for names, fixes in ENGINES.items() if said in map(_letters, names)), ())


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
