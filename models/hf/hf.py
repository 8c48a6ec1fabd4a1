"""A network of Hugging Face Transformers, split into layers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.capture import Captured, split_or_whole, torchvision_import
from harness.core.problem import Problem, refuse
from harness.interfaces import Batch
from models.hf import tasks
from models.hf.config import FIRST, Config, check, path, read, task_of

TITLE = "model=hf"
CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
}
"""The class of Transformers for each task."""
OFFSET = 2
"""More embeddings of positions than a network has positions, as OPT, or the other way around, as Roberta."""
IMAGE = {"image_size": 224, "num_channels": 3}
"""What a configuration must say of an image, with the usual values."""


class HuggingFace:
    """Implements `harness.interfaces.Model`. Raises CannotRun that names each key whose value is impossible.

    `name` has the file's name and a digest of its content and the overrides: profiles are kept by it.
    """

    def __init__(self, config: Config) -> None:
        refuse(check(config), TITLE)
        description = read(config)
        kind = task_of(config, description)
        assert kind is not None
        self.settings, self.kind, self.weights = _settings(config, description), kind, config.weights
        self.file = str(path(config))
        refuse(_no_network(config, self.settings, kind), TITLE)
        refuse(_too_long(config, self.settings, kind), TITLE)
        self._task = tasks.TASKS[kind](self.settings, config.sequence)
        self.task, self.input_shape, self.classes = self._task.task, self._task.input_shape, self._task.classes
        content = json.dumps([description, kind, config.sequence, config.weights], sort_keys=True)
        self.name = f"hf_{path(config).stem}_{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def network(self) -> nn.Module:
        """The network itself, on the default device: with random weights, or those of `model.weights`."""
        from harness.capture import experts

        if self.weights is None or torch.get_default_device().type == "meta":
            made: nn.Module = _fresh(self.settings, self.kind, self.file)
        else:
            made = _loaded(self.settings, self.kind, self.weights)
        experts.use(made)
        return made.train()

    def layers(self) -> nn.Sequential:
        """The network as layers, as many as it can be split into, freshly made; on the meta device without memory."""
        return self.captured().chain

    def captured(self) -> Captured:
        """The network with what its task takes of its result, freshly made, and its layers."""
        dtype = torch.float32 if self.kind == "image" else torch.int64
        module, inputs = _Logits(self.network(), self._task), torch.zeros(2, *self.input_shape, dtype=dtype)
        return Captured(module, split_or_whole(module, (inputs,)), (inputs,))

    def logits(self, network: nn.Module, inputs: Tensor) -> Tensor:
        """What a network gives for inputs, whose last dimension are the classes."""
        return self._task.logits(network, inputs)

    def sample(self, n: int) -> Batch:
        """n synthetic samples."""
        return self._task.sample(n)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the samples' losses (`models.hf.tasks`)."""
        return self._task.loss(output, target)


class _Logits(nn.Module):
    """A network as a module from one tensor to its logits."""

    def __init__(self, network: nn.Module, task: tasks.Causal | tasks.Image) -> None:
        super().__init__()
        self.network, self.task = network, task

    def forward(self, inputs: Tensor) -> Tensor:
        return self.task.logits(self.network, inputs)


def _no_network(config: Config, settings: Any, kind: str) -> list[Problem]:
    """A task for which Transformers has no network of this type, and sizes of an image that the file does not say."""
    fitting = [task for task in CLASSES if type(settings) in _maker(task)._model_mapping]
    if kind not in fitting:
        message = f"{kind} is none that a network of type {settings.model_type} has in Transformers"
        fixes = tuple({"model.task": task} for task in fitting)
        return [Problem("model.task", config.task, message, fixes, "" if fixes else "a file of model.py:build")]
    if kind == "image" and (lacking := [key for key in IMAGE if getattr(settings, key, None) is None]):
        message = f"does not say {' and '.join(lacking)} of the images"
        hint = f'"model.overrides={{{",".join(f"{key}:{IMAGE[key]}" for key in lacking)}}}"'
        return [Problem("model.config", str(path(config)), message, hint=hint)]
    return []


def _too_long(config: Config, settings: Any, kind: str) -> list[Problem]:
    """A sequence that is longer than a network with learned positions has them; others, as rotary ones, have no end."""
    positions = getattr(settings, "max_position_embeddings", None)
    if kind == "image" or not isinstance(positions, int) or config.sequence <= positions - OFFSET:
        return []
    with torch.device("meta"):
        network = _fresh(settings, kind, str(path(config)))
    tokens = network.get_input_embeddings()
    for module in network.modules():
        if isinstance(module, nn.Embedding) and positions <= module.num_embeddings <= positions + OFFSET:
            # Roberta's first position is the one after that of padding
            most = min(positions, module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
            if module is not tokens and config.sequence > most:
                message = f"is longer than the {most:,} positions that the network has learned embeddings for"
                hint = f'"model.overrides={{max_position_embeddings:{config.sequence + positions - most}}}"'
                return [Problem("model.sequence", config.sequence, message, ({"model.sequence": most},), hint)]
    return []


def _maker(kind: str) -> Any:
    """The class of Transformers for a task."""
    import transformers

    return getattr(transformers, CLASSES[kind])


def _fresh(settings: Any, kind: str, file: str) -> Any:
    """A network with random weights. Raises CannotRun for a configuration that its class refuses."""
    try:
        return _maker(kind).from_config(settings)
    except (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        refuse([_refused(file, error)], TITLE)


def _refused(file: str, error: Exception) -> Problem:
    return Problem("model.config", file, f"is refused by Transformers: {' '.join(str(error).split())}")


def _loaded(settings: Any, kind: str, weights: str) -> nn.Module:
    """A network with the weights of a folder. Raises CannotRun for a folder of another network: one that has less than
    half of the weights, or other shapes."""
    from safetensors import SafetensorError

    folder = Path(weights).expanduser()
    try:
        made, found = _maker(kind).from_pretrained(
            folder, config=settings, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:  # cut short, or of other shapes
        reason = f"{error}".strip().partition("\n")[0]
        refuse([Problem("model.weights", weights, f"cannot be loaded: {type(error).__name__}: {reason}")], TITLE)
    network: nn.Module = made
    sizes = {name: weight.numel() for name, weight in network.named_parameters()}
    missing = sum(sizes.get(name, 0) for name in found["missing_keys"])
    if 2 * missing > sum(sizes.values()):
        message = f"has {sum(sizes.values()) - missing:,} of the network's {sum(sizes.values()):,} parameters"
        hint = f"the folder of such a network, or model.config={folder / 'config.json'}"
        refuse([Problem("model.weights", weights, message, hint=hint)], TITLE)
    return network


def _settings(config: Config, description: dict[str, Any]) -> Any:
    """The configuration object of Transformers. Raises CannotRun for a kind of model or a value that it refuses."""
    try:
        torchvision_import.prepare()
        from huggingface_hub.errors import StrictDataclassError
        from transformers import CONFIG_MAPPING, AutoConfig
    except ModuleNotFoundError as error:
        hint = f"{error.name} is missing: pip install -e '.[hf]'"
        refuse([Problem("model", "hf", "needs Hugging Face Transformers", hint=hint)], TITLE)
    kind, named = description["model_type"], str(path(config))
    if kind not in CONFIG_MAPPING:
        message = f"has model_type {kind}, which this release of Transformers does not know"
        refuse([Problem("model.config", named, message, ({"model.config": FIRST},))], TITLE)
    values = {key: value for key, value in description.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(kind, **values)
    except (StrictDataclassError, TypeError, ValueError) as error:
        refuse([_refused(named, error)], TITLE)


def build(config: Config) -> HuggingFace:
    """The model; raises CannotRun that names each key whose value is impossible."""
    return HuggingFace(config)
