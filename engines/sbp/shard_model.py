"""Replaces layers by sharded ones as a program says; layers that it does not name stay as they are.

Modules are replaced in the order in which they ran on the meta device, so that the layout of each module's input is
known.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from engines.sbp.block_collectives import BlockCollectives
from engines.sbp.block_layout import Dim, Layout
from engines.sbp.instruction import Exchange, Instruction, Program, Unrunnable
from engines.sbp.sharded_layers import BatchNorm, BlockDropout, Entry, LayerNorm, MovedSum, Product, RMSNorm
from engines.sbp.sharded_state import Cut, Shard
from harness.capture.layers import Layer, Whole
from harness.nn import dropout
from harness.nn.dropout import Dropout
from harness.nn.skip import Sum
from harness.sbp.matmul_chain import part_names


class ModelSharder:
    """`shards` has every parameter and buffer by its first name, once `split` has gone through. With `local_statistics`
    batch norms stay as they are; `local` has the digits that split the samples of each of their buffers. Layers that
    are `apart` draw for this rank's block alone (`Traits.whole_draws`)."""

    def __init__(
        self,
        layers: nn.Sequential,
        program: Program,
        by: BlockCollectives,
        local_statistics: bool = False,
        apart: Collection[str] = (),
    ) -> None:
        self.layers, self.by, self.local_statistics, self.apart = layers, by, local_statistics, apart
        for name in apart:
            layer = layers.get_submodule(name)
            if isinstance(layer, Layer | Whole):  # its ranks would all draw the same for other samples
                layer.part = by.groups.rank
        self.local: dict[str, tuple[int, ...]] = {}
        self.instructions: dict[str, Instruction] = {}
        self.entries: dict[str, Entry] = {}
        for name, instruction in program.instructions.items():
            entry, item = Entry(instruction, by), instruction.item
            for part, outputs in zip(part_names(name), item.parts or (item.outputs,), strict=True):
                path = _path(layers, part)
                own = replace(item, name=part, outputs=outputs, parts=())
                self.instructions[path], self.entries[path] = replace(instruction, item=own), entry
        self.shards: dict[str, Shard] = {}
        self.known: dict[nn.Parameter, nn.Parameter] = {}
        self.first_names = {parameter: name for name, parameter in layers.named_parameters()}
        self.at = program.start
        whole = [
            (name.partition(".")[0], instruction)
            for name, instruction in self.instructions.items()
            if instruction.item.whole
        ]
        self.begin = {
            layer: instruction.arrives for layer, instruction in reversed(whole)
        }  # of layers that are kept whole
        self.end = {layer: instruction.output_layout for layer, instruction in whole}
        self.attended: Layout | None = None
        self.pending: Instruction | None = None
        self.norms: set[tuple[int, ...]] = set()

    def split(self, ran: Sequence[str]) -> None:
        """`ran` are the names of the modules in the order in which they ended."""
        done: set[str] = set()
        for name in ran:
            if name and name not in done:
                done.add(name)
                self._module(name, self.layers.get_submodule(name))
        self._check_sum()
        for name, parameter in self.layers.named_parameters():
            if name not in self.shards:  # a layer that did not run on its own
                self.shards[name] = Shard(tuple(parameter.shape), {}, self.by.mesh.all)

    def _module(self, name: str, module: nn.Module) -> None:
        instruction = self.instructions.get(name)
        self.at = self.begin.pop(name.partition(".")[0], self.at)
        if instruction is not None:
            self._matmul(name, module, instruction)
        elif isinstance(module, Sum):
            if self.pending and (self.pending.past or self.pending.on):
                self._replace(name, MovedSum(self.pending, self.by))
                self.at = self.pending.on.after if self.pending.on else self.at
            self.pending = None
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            self._norm(name, module)
        elif isinstance(module, _BatchNorm):
            self._batch_norm(name, module)
        elif self._is_dropout(name, module):
            heads = self.attended is not None
            layout = self.attended if self.attended else self.at
            if layout.rows.split or layout.columns.split:
                self._replace(name, BlockDropout(module, layout, self.by, 1 if heads else None))
        else:
            self._plain(name, module)
        if instruction is not None:
            self._check_sum()
            self.pending = instruction
            self.at = self.at if instruction.item.whole else instruction.output_layout
            self.attended = instruction.output_layout if instruction.attended else None
        self.at = self.end.get(name, self.at)

    def _is_dropout(self, name: str, module: nn.Module) -> bool:
        """Whether a module drops elements, and this rank can have its part of the mask of the whole."""
        parted = isinstance(module, Dropout) or name.partition(".")[0] not in self.apart
        return parted and module.training and dropout.has_mask(module)

    def _check_sum(self) -> None:
        """Raise Unrunnable for a branch whose residual, or sum, has to be moved, and has no module that does so."""
        if self.pending and (self.pending.past or self.pending.on):
            name = self.pending.item.name
            raise Unrunnable(f"{name}: what is added to its output must go through a harness.nn.skip.Sum")

    # -- what each kind of layer becomes ----------------------------------------------------------------------------

    def _matmul(self, name: str, module: nn.Module, instruction: Instruction) -> None:
        if instruction.item.whole:
            self._whole(name, module, instruction)
            return
        rows, columns = Cut(instruction.outputs, instruction.heads), Cut(instruction.inputs)
        cuts = {0: rows, 1: columns}
        if instruction.item.look_up:
            cuts = {0: columns, 1: rows}
        weight = self._parameter(dict(module.named_parameters())["weight"], cuts, instruction.replicas, True)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            out = Cut(instruction.leaves.columns, instruction.heads)
            bias = self._parameter(bias, {0: out}, _digits(instruction.leaves.rows), False)
        first = 0
        if instruction.item.look_up and instruction.inputs.split:
            first = int(instruction.inputs.mine(instruction.item.inputs, self.by.mesh, self.by.groups.rank)[0])
        self._replace(name, Product(module, instruction, self.entries[name], weight, bias, first))

    def _whole(self, name: str, module: nn.Module, instruction: Instruction) -> None:
        """Keep a module whole: it computes all features of its own samples, and collectives before and after it change
        the layout."""
        layer = self.layers.get_submodule(name.partition(".")[0])
        by = self.by
        if instruction.before:
            layer.register_forward_pre_hook(lambda _, given: tuple(_moved(x, instruction.before, by) for x in given))
        if instruction.after:
            layer.register_forward_hook(lambda _, given, out: _moved(out, instruction.after, by))
        self._plain(name, module)

    def _norm(self, name: str, module: nn.LayerNorm | nn.RMSNorm) -> None:
        digits = _digits(self.at.columns)
        self.norms |= {digits} - {()}
        for key in ("weight", "bias"):
            parameter = getattr(module, key, None)
            if parameter is not None:
                cuts = {parameter.dim() - 1: Cut(self.at.columns)}
                setattr(module, key, self._parameter(parameter, cuts, _digits(self.at.rows), False))
        if digits:
            if len(module.normalized_shape) > 1:
                raise Unrunnable(f"{name} norms {len(module.normalized_shape)} dimensions, one of which is split")
            if isinstance(module, nn.LayerNorm):
                self._replace(name, LayerNorm(module, digits, self.by))
            else:
                self._replace(name, RMSNorm(module, digits, self.by))

    def _batch_norm(self, name: str, module: _BatchNorm) -> None:
        cut, digits = {0: Cut(self.at.columns)}, _digits(self.at.rows)
        for key in ("weight", "bias"):
            parameter = getattr(module, key)
            if parameter is not None:
                setattr(module, key, self._parameter(parameter, cut, digits, False))
        for key, buffer in list(module.named_buffers(recurse=False)):
            shard = Shard(tuple(buffer.shape), cut if buffer.dim() and self.at.columns.split else {})
            self.shards[f"{name}.{key}"] = shard
            self.local |= {f"{name}.{key}": digits} if self.local_statistics else {}
            setattr(module, key, shard.of(buffer, self.by.mesh, self.by.groups.rank))
        if digits and not self.local_statistics:
            self.norms.add(digits)
            self._replace(name, BatchNorm(module, digits, self.by))

    def _plain(self, name: str, module: nn.Module) -> None:
        """A layer that works element by element, or on whole features: parameters that go with these are cut."""
        instruction = self.instructions.get(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            last = parameter.dim() - 1
            cuts = {last: Cut(self.at.columns)} if self.at.columns.split else {}
            weight = bool(instruction) and key == "weight"
            made = self._parameter(parameter, cuts, _digits(self.at.rows), weight)
            setattr(module, key, made)

    def _parameter(
        self, whole: nn.Parameter, cuts: dict[int, Cut], sums: tuple[int, ...], weight: bool
    ) -> nn.Parameter:
        """Return this rank's block of a parameter; layers that share the parameter get the same block."""
        if whole in self.known:
            return self.known[whole]
        cuts = {n: cut for n, cut in cuts.items() if cut.dim.split or cut.heads}
        shard = Shard(tuple(whole.shape), cuts, sums, weight)
        block = shard.of(whole, self.by.mesh, self.by.groups.rank)
        made = nn.Parameter(block, whole.requires_grad) if cuts else whole
        self.shards[self.first_names[whole]] = shard
        self.known[whole] = self.known[made] = made
        return made

    def _replace(self, name: str, module: nn.Module) -> None:
        parent, _, key = name.rpartition(".")
        module.train(self.layers.training)
        setattr(self.layers.get_submodule(parent), key, module)


def _path(layers: nn.Sequential, name: str) -> str:
    """The module of a matmul: the one of that name, or the only one inside of it that has a matrix."""
    inside = [
        path
        for path, module in layers.get_submodule(name).named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    ]
    if len(inside) != 1 and "" not in inside:
        raise Unrunnable(f"{name} has {len(inside)} matrices, the plan has one matmul")
    return name if "" in inside else f"{name}.{inside[0]}"


def _digits(dim: Dim) -> tuple[int, ...]:
    return tuple(sorted(dim.split))


def _moved(value: Any, exchange: Exchange | None, by: BlockCollectives) -> Any:
    """Tensors, alone or in a tuple."""
    if isinstance(value, Tensor):
        return by(value, exchange)
    return tuple(_moved(one, exchange, by) for one in value) if isinstance(value, tuple) else value
