"""The keys of `model=hf`, and the configuration file that they name."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core import files
from harness.core.problem import Problem, ProblemError
from harness.core.value_checks import closest, one_of
from models.config_ranges import at_least

SHIPPED = Path(__file__).parent / "configs"
FIRST = "llama_small"
TASKS = {
    "causal": ("ForCausalLM", "LMHeadModel"),
    "masked": ("ForMaskedLM",),
    "seq2seq": ("ForConditionalGeneration", "ForSeq2SeqLM"),
    "image": ("ForImageClassification",),
}
"""What a model learns -> how the names of its classes end."""


@dataclass
class Config:
    """A network of Hugging Face Transformers: its configuration file, and random weights or those of a local folder."""

    name: str = "hf"
    """The network: models/hf."""
    config: str | None = None
    """A configuration file (config.json of a model, or its folder), or the name of one in models/hf/configs:
    llama_small, llama3_8b, gpt2_small, gpt2, bert_small, bert_base, t5_small, t5_base, mixtral_small, mixtral_8x7b,
    vit_small, vit_base. null: config.json in model.weights if that is given, else llama_small."""
    task: str | None = None
    """What it learns: causal (the next token), masked (tokens that are hidden), seq2seq (one sequence from another),
    image (the class of an image). null: what `architectures` in the file says."""
    sequence: int = 64
    """Sequence length: tokens of a sample; of each of the two sequences of seq2seq. Images have no such length."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Changes of the configuration, in its own words: model.overrides={num_hidden_layers: 2, vocab_size: 512}."""
    weights: str | None = None
    """A local folder with config.json and weights (*.safetensors). null: random weights. Nothing is downloaded."""


def check(config: Config) -> list[Problem]:
    """A file that cannot be read, a task that is unknown or not said, a folder without weights."""
    problems = at_least(config, "sequence", 1)
    if config.task is not None:
        problems += one_of("model.task", config.task, tuple(TASKS))
    if without := _weights(config):
        return [*problems, *without]
    try:
        description = read(config)
    except ProblemError as error:
        return [*problems, *error.problems]
    if config.task is None and task_of(config, description) is None:
        named = description.get("architectures")
        message = f"is needed: `architectures` in {path(config)} is {named}, which says none of {', '.join(TASKS)}"
        problems.append(Problem("model.task", None, message, tuple({"model.task": task} for task in TASKS)))
    return problems


def identity(config: Config) -> dict[str, Any]:
    """The configuration in place of its file, and the release that makes the network of it."""
    release = importlib.metadata.version("transformers")
    return {"config": read(config), "overrides": {}, "weights": None, "transformers": release}


def path(config: Config) -> Path:
    """Returns the configuration file: as given, in the folder given, or one of models/hf/configs, .json or not."""
    if config.config is None:
        return Path(config.weights).expanduser() / "config.json" if config.weights else SHIPPED / f"{FIRST}.json"
    given = Path(config.config).expanduser()
    shipped = SHIPPED / f"{config.config.removesuffix('.json')}.json"
    if not given.is_file() and "/" not in config.config and shipped.is_file():
        return shipped
    return given / "config.json" if given.is_dir() else given


def read(config: Config) -> dict[str, Any]:
    """Returns the configuration with `overrides`. Raises ProblemError for a file that is none."""
    file, key = path(config), "model.config" if config.config is not None else "model.weights"
    given = config.config if config.config is not None else config.weights
    try:
        description = json.loads(files.read_bytes(file))
    except FileNotFoundError:
        known = sorted(one.stem for one in SHIPPED.glob("*.json"))
        near = closest(file.stem, known, FIRST)
        message = f"names no file: {file} is not there, and none of models/hf/configs has this name"
        raise ProblemError(Problem(key, given, message, ({"model.config": near},))) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ProblemError(Problem(key, given, f"cannot be read as JSON: {reason}")) from error
    if not (isinstance(description, dict) and isinstance(description.get("model_type"), str)):
        message = 'is no configuration of Transformers: it has no "model_type", such as "llama"'
        raise ProblemError(Problem(key, given, message, ({"model.config": FIRST},)))
    return {**description, **config.overrides}


def task_of(config: Config, description: dict[str, Any]) -> str | None:
    """Returns what the model learns, None if neither `task` nor the file says it."""
    if config.task is not None:
        return config.task
    named = description.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return next((task for task, ends in TASKS.items() if any(name.endswith(ends) for name in names)), None)


def _weights(config: Config) -> list[Problem]:
    if config.weights is None:
        return []
    folder = Path(config.weights).expanduser()
    if not folder.is_dir():
        return [Problem("model.weights", config.weights, "is no folder", ({"model.weights": None},))]
    if not any(folder.glob("*.safetensors")):
        return [Problem("model.weights", config.weights, "has no *.safetensors", ({"model.weights": None},))]
    return []
