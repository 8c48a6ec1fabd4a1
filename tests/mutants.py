"""Committed faults: each must make a named test fail. `make mutants` (or `python -m tests.mutants [name ...]`).

A fault is a replacement of text in one file, applied to a copy of the tree. A fault that no longer applies, or that
its test survives, is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("docs", "engines", "harness", "models", "planners", "tests", "conf", "sweeps", "pyproject.toml", "run.py")
CONTRACT = "tests/engines/test_contract.py"
DEEPSPEED = "tests/engines/test_deepspeed.py"
GPIPE = "tests/engines/gpipe/test_gpipe_module.py"
RESOURCES = "tests/harness/simulate/test_resources.py"
SBP, MYELIN = "tests/engines/sbp", "tests/engines/myelin"
TUNE = "tests/harness/planning/tune"
BRUTE_FORCE = "tests/harness/simulate/test_against_brute_force.py"


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` in `file`; `test` (a pytest node, or a file with -k words) must then fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
    only: str = ""


PERIODIC = "tests/planners/periodic"

MUTANTS = (
    Mutant("a group that takes one item too many", "planners/periodic/one_f_one_b_star.py",
           "return delay + load + waiting * (load > waiting)", "return delay + load",
           f"{PERIODIC}/test_one_f_one_b_star.py"),
    Mutant("a special device that never holds one more", "planners/periodic/min_period.py",
           "of_group[group] += stored", "pass",
           f"{PERIODIC}/test_min_period.py"),
    Mutant("labels that forget the delay", "planners/periodic/min_period.py",
           "delay = delay_after_message(chain.duplex, delay, chain.crossing[first], period)", "pass",
           f"{PERIODIC}/test_min_period.py"),
    Mutant("tied weights that count in each stage of a device", "planners/periodic/task_times.py",
           "sizes[device] -= self.chain.counted_twice(ranges)", "pass",
           f"{PERIODIC}/test_layer_ticks.py"),
    Mutant("memory of a link's buffers left out", "planners/periodic/task_times.py",
           "cuts += chain.buffers[stage.last + 1]", "pass",
           f"{PERIODIC}/test_task_times.py"),
    Mutant("tasks that overlap those a period later", "planners/periodic/retiming.py",
           "edges.append((j, i, tasks[j].ticks, periods + 1))", "edges.append((j, i, tasks[j].ticks, periods + 2))",
           f"{PERIODIC}/test_retiming.py"),
    Mutant("a later stage that lags after, but stores as much", "planners/periodic/milp.py",
           'row[self.columns[forward, self.places[number, "F"]]] = -weight', "pass",
           f"{PERIODIC}/test_milp.py"),
    Mutant("a validator that looks at one period", "harness/schedule/pattern_validity.py",
           "return [*_overlaps(replay, duplex), *_early(replay), *_overfull(replay, stored, fixed, limits)]",
           "return [*_overlaps(replay, duplex), *_early(replay)]",
           "tests/harness/schedule/test_pattern_validity.py"),
    Mutant("messages of a pattern out of line", "harness/simulate/lowering.py",
           "for line in self.schedule.message_order:\n", "for line in ():\n",
           "tests/harness/simulate/test_periodic.py"),
    Mutant("gradients of the newest weights", "engines/periodic/two_version_stage.py",
           "return self.copies[group % VERSIONS]", "return self.copies[self.newest]",
           "tests/engines/periodic/test_delayed.py"),
    Mutant("a lost gradient", "engines/gpipe/cpu_pipeline.py",
           "if edge is not None and gradient is not None:",
           "if edge is not None and gradient is not None and slot.micro_batch != 1:",
           CONTRACT, "trains_like_single and skips-2-never"),
    Mutant("a lost skip gradient", "engines/gpipe/cpu_pipeline.py",
           'target.grads_out[part] = tuple(None if g is None else g.clone() for g in gradients)',
           'target.grads_out[part] = tuple(None if g is None or part else g.clone() for g in gradients)',
           CONTRACT, "trains_like_single and skips-2-never"),
    Mutant("swapped micro-batches", "engines/gpipe/cpu_pipeline.py",
           "last = [self.slots[i, self.n - 1] for i in range(self.m)]",
           "last = [self.slots[i, self.n - 1] for i in reversed(range(self.m))]",
           CONTRACT, "trains_like_single and skips-2-never"),
    Mutant("a stale random state in recomputation", "engines/gpipe/cpu_pipeline.py",
           "hash((self.random_seed, j, slot.micro_batch))",
           "hash((self.random_seed, j, slot.micro_batch, not slot.before))",
           GPIPE, "plain_dropout"),
    Mutant("random numbers that all stages share", "engines/gpipe/cpu_pipeline.py",
           "hash((self.random_seed, j, slot.micro_batch))", "hash((self.random_seed, slot.micro_batch))",
           "tests/engines/gpipe/test_task_rng.py"),
    Mutant("random numbers that all micro-batches share", "engines/gpipe/cpu_pipeline.py",
           "hash((self.random_seed, j, slot.micro_batch))", "hash((self.random_seed, j))",
           "tests/engines/gpipe/test_task_rng.py"),
    Mutant("buffers updated twice", "harness/runtime/recomputation.py",
           "            for place in now.keys() - kept.keys():", "            for place in ():",
           "tests/engines/gpipe/test_recomputation.py", "CountLate"),
    Mutant("a failed pass that is kept", "engines/gpipe/cpu_pipeline.py",
           'self.error = RuntimeError("this pass of the pipeline has failed: call the pipeline again")', "pass",
           "tests/engines/gpipe/test_failed_passes.py"),
    Mutant("dropout keyed without the micro-batch", "engines/gpipe/stage.py",
           "dropout.keyed(self.seed, self.step, micro_batch)", "dropout.keyed(self.seed, self.step, 0)",
           CONTRACT, "trains_like_single and skips-2-never"),
    Mutant("autocast forgotten by the workers", "engines/gpipe/stage.py",
           "torch.autocast(self.device_type, self.autocast_dtype, self.autocast, self.autocast_cache)",
           "torch.autocast(self.device_type, self.autocast_dtype, False, self.autocast_cache)",
           GPIPE, "autocast"),
    Mutant("autocast's cache forgotten by the workers", "engines/gpipe/stage.py",
           "torch.autocast(self.device_type, self.autocast_dtype, self.autocast, self.autocast_cache)",
           "torch.autocast(self.device_type, self.autocast_dtype, self.autocast)",
           GPIPE, "autocast"),
    Mutant("tied gradients that overflow float16 unnoticed", "engines/myelin/optimizer_step.py",
           "overflows(own, replicas) or overflows(tied, 1)", "overflows(own, replicas)",
           f"{MYELIN}/test_optimizer_step_half.py", "tied"),
    Mutant("squares of means that cancel", "harness/nn/batchnorm.py",
           "(shares * (variances + (means - mean).square())).sum(0)",
           "(shares * (variances + means.square())).sum(0) - mean.square()",
           "tests/harness/nn/test_batchnorm.py"),
    Mutant("gradients of a tied weight that are not summed", "engines/gpipe/tied_copies.py",
           "for gradient in there[1:]:", "for gradient in there[2:]:",
           CONTRACT, "trains_like_single and tied-2-never"),
    Mutant("a tied weight's earlier gradient counted twice", "engines/gpipe/tied_copies.py",
           "for parameter in others:\n            parameter.grad = None",
           "for parameter in others:\n            pass",
           "tests/engines/gpipe/test_tied_copies.py", "nothing_twice"),
    Mutant("an optimizer that does not wait for tied weights", "harness/schedule/dependency_graph.py",
           " + over_replicas[op.stage] + over_copies[op.stage]", " + over_replicas[op.stage]",
           "tests/harness/schedule/test_tied_weight_ops.py"),
    Mutant("AmoebaNet's max pools that average", "models/amoebanet/operations.py",
           "return nn.MaxPool2d(3, stride, padding=1)", "return nn.AvgPool2d(3, stride, padding=1)",
           "tests/models/test_amoebanet_forward.py", "by_hand or pools"),
    Mutant("attention that sees the future", "models/gpt/block.py", "is_causal=True", "is_causal=False",
           "tests/models/test_gpt_forward.py"),
    Mutant("targets that are the inputs", "models/data/text/text.py", "windows[:, 1:]", "windows[:, :-1]",
           "tests/models/data/test_text.py", "next_tokens"),
    Mutant("a batch that nobody asked for", "harness/worker/prefetch.py", "if step + 1 in self._steps:",
           "if self._steps:", "tests/harness/worker/test_prefetch.py", "none_beyond_the_last"),
    Mutant("fused attention without FLOPs", "harness/measure/matmul_finder.py",
           "_aten._scaled_dot_product_flash_attention_for_cpu: Products._attention,", "",
           "tests/models/test_zoo.py", "gpt"),
    Mutant("a tied parameter counted twice", "harness/core/model_profile.py",
           "sum(layer.param_bytes for layer in held) - repeated", "sum(layer.param_bytes for layer in held)",
           "tests/harness/core/test_model_profile.py"),
    Mutant("a dropped portal", "harness/schedule/transfers.py",
           "result.append(Transfer(skip.source, skip.target, skip.name, skip.bytes))",
           "result += [Transfer(j, j + 1, skip.name, skip.bytes) for j in range(skip.source, skip.target)]",
           "tests/models/test_unet.py", "copied_elements"),
    Mutant("no dependency between micro-batches", "engines/gpipe/cpu_autograd_graph.py",
           "if slot.recompute and not self.dependency:", "if slot.recompute:",
           GPIPE, "order_of_the_clock"),
    Mutant("recomputation of the last micro-batch, too", "harness/schedule/builders/gpipe.py",
           '(mode == "except_last" and micro_batch < micro_batches - 1)', '(mode == "except_last")',
           GPIPE, "number_of_recomputed"),
    Mutant("copies after the computations of their cycle", "harness/schedule/builders/gpipe.py",
           'for transfer in into[j]\n            ]\n        for i, j in cycle:\n',
           'for transfer in into[j]\n            ]\n',
           CONTRACT, "gpipe_runs_its_schedule"),
    Mutant("statistics updated twice", "harness/runtime/recomputation.py",
           "with throwaway(statistics(self.modules)):", "with throwaway([]):",
           GPIPE, "running_statistics"),
    Mutant("deferred statistics for each micro-batch", "harness/nn/batchnorm.py",
           "if self.seen >= self.chunks:", "if self.seen >= 1:",
           GPIPE, "deferred_batch_norm"),
    Mutant("the backward pass in the calling thread", "harness/runtime/cpu_streams.py",
           "        self._jobs.put(job)\n        return job",
           "        self._execute(job)\n        return job",
           GPIPE, "stages_run_at_once"),
    Mutant("streams that are none", "engines/gpipe/cpu_pipeline.py",
           "if self.queues.copy is None:", "if False:",
           GPIPE, "without_streams"),
    Mutant("an error without its place", "engines/gpipe/stage.py",
           "error.add_note(StageNote(where))", "pass",
           GPIPE, "names_its"),
    Mutant("work continues after an error", "harness/runtime/cpu_streams.py",
           "if job.always or job.run.error is None:", "if True:",
           GPIPE, "first_error or interrupt"),
    Mutant("the optimizer of one stage forgotten", "engines/gpipe/session.py",
           "Job(run, optimizer.step, Op", "Job(run, (optimizer.step, lambda: None)[stage.number > 0], Op",
           CONTRACT, "trains_like_single and skips-2-never"),
    Mutant("optimizer state left after", "harness/runtime/training_state.py",
           "if id(parameter) in own and name in saved:", "if False:",
           CONTRACT, "states_move"),
    Mutant("a shared weight stepped twice", "engines/gpipe/session.py",
           "for p in layer.parameters() if p not in seen", "for p in layer.parameters()",
           CONTRACT, "several_stages and tied"),
    Mutant("masks that begin again after a resume", "engines/gpipe/session.py",
           "self.stage.passes = self.steps", "pass",
           CONTRACT, "states_move"),
    Mutant("a layer in two places, kept once", "harness/nn/skip.py",
           "[(name, layer) for name, layer in sequence._modules.items() if layer is not None]",
           "list(sequence.named_children())",
           CONTRACT, "trains_like_single and shared"),
    Mutant("a stashed tensor that the next stage writes over", "engines/gpipe/cpu_pipeline.py",
           "slot.outs = _apart(slot.outs)", "pass",
           "tests/engines/gpipe/test_corners.py", "not_changed_by_the_next_stage"),
    Mutant("queued work continues after an interrupt", "engines/gpipe/cpu_autograd_graph.py",
           "            ctx.run.abandon(error)\n", "",
           "tests/engines/gpipe/test_corners.py", "interrupt_in_the_backward"),
    Mutant("gradient accumulation that forgets a micro-batch", "engines/single/session.py",
           "total += task.run(", "self.stage.zero_grad() if i == 1 else None\n            total += task.run(",
           CONTRACT, "trains_like_single and skips-2-never"),
    Mutant("a link that carries several messages at once", "harness/simulate/lowering.py",
           "self.need(node, *map(self.resource, route.links))", "pass",
           BRUTE_FORCE, "slow_simulation"),
    Mutant("last come, first served", "harness/simulate/event_loop.py",
           "self.line(resource, node).append(node)", "self.line(resource, node).appendleft(node)",
           BRUTE_FORCE, "slow_simulation"),
    Mutant("a network port that nobody shares", "harness/simulate/fair_sharing.py",
           "crossing[resource] = crossing.get(resource, 0.0) + times", "crossing[resource] = times",
           RESOURCES, "six_rings_share"),
    Mutant("replicas that cost nothing", "harness/simulate/routes.py",
           "return self.schedule.counterparts(0)", "return [0]",
           RESOURCES, "six_rings_share"),
    Mutant("a ring that sends everything to everyone", "harness/simulate/routes.py",
           "sent, messages = rounds * (g - 1) / g * op.bytes", "sent, messages = rounds * (g - 1) * op.bytes",
           RESOURCES, "textbook"),
    Mutant("a rendezvous that does not wait", "harness/schedule/dependency_graph.py",
           'if rendezvous and kind == "recv":', "if False:",
           RESOURCES, "rendezvous_waits"),
    Mutant("tasks that do not wait for their messages", "harness/schedule/dependency_graph.py",
           "return self.existing(tasks) + arrivals.get((j, i, True), [])", "return self.existing(tasks)",
           "tests/harness/simulate/test_simulate.py", "latency_and_bytes"),
    Mutant("activations that are never freed", "harness/simulate/memory_timeline.py",
           "self.bytes += (size, -size)", "self.bytes += (size, 0)",
           "tests/harness/simulate/test_memory_timeline.py", "recomputation_keeps"),
    Mutant("a gradient that takes no room while it is added", "harness/simulate/memory_timeline.py",
           "accumulated = min(1.0, memory.gradients)", "accumulated = 0.0",
           "tests/harness/simulate/test_memory_timeline.py", "coexists_with"),
    Mutant("kernels that start in no time", "harness/simulate/layer_times.py",
           "return layer.kernels * device.kernel_s + ", "return ",
           "tests/harness/simulate/test_layer_times.py"),
    Mutant("a profile that is scaled the wrong way round", "harness/simulate/layer_times.py",
           "ratio = _forward_s(layer, terms, profile, target) / _forward_s(layer, terms, profile, origin)",
           "ratio = _forward_s(layer, terms, profile, origin) / _forward_s(layer, terms, profile, target)",
           "tests/harness/simulate/test_layer_times.py"),
    Mutant("a balance that leaves layers out", "planners/given.py",
           "if given_layers != layers:", "if stated > layers:",
           "tests/planners/test_given.py"),
    Mutant("views that count as kernels", "harness/measure/kernel_counter.py",
           "def _is_kernel(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:\n",
           "def _is_kernel(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:\n    return True\n\n\n"
           "def _unused(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:\n",
           "tests/harness/measure/test_kernel_counter.py"),
    Mutant("dropout in a stage of ranks keyed without the micro-batch", "harness/runtime/stage_module.py",
           "dropout.keyed(*self.key)", "dropout.keyed(*self.key[:2], 0)",
           DEEPSPEED, "the_pipeline_trains and skips"),
    Mutant("running statistics updated by DeepSpeed's recomputation", "harness/runtime/stage_module.py",
           "        if self.again:\n            with", "        if False:\n            with",
           DEEPSPEED, "recomputes and norms"),
    Mutant("gradients of skips that DeepSpeed forgets", "engines/deepspeed/pipeline_module.py",
           "*(leaf.grad for leaf in leaves)", "*(None for leaf in leaves)",
           DEEPSPEED, "the_pipeline_trains and skips"),
    Mutant("a backward pass for each tensor of a message", "engines/deepspeed/pipeline_module.py",
           "if len(floating) < 2:", "if True:",
           DEEPSPEED, "one_backward_pass"),
    Mutant("ties that DeepSpeed does not know", "engines/deepspeed/pipeline_module.py",
           "return self.shared.weights_and_groups()", "return []",
           DEEPSPEED, "the_pipeline_trains and tied"),
    Mutant("gradients that DeepSpeed clips", "engines/deepspeed/load_deepspeed.py",
           '"gradient_clipping": 0.0', '"gradient_clipping": 0.01',
           DEEPSPEED, "zero_trains and unet"),
    Mutant("replicas of the documented engine that stay apart", "docs/extending.md",
           "dist.all_reduce(gradient)", "gradient.abs()",
           "tests/docs/test_extending.py", "trains_like_single"),
    Mutant("running statistics of the first replica alone", "harness/runtime/distributed_session.py",
           "return torch.stack(values).mean(0)", "return values[0]",
           DEEPSPEED, "running_statistics"),
    Mutant("every replica trains on the same samples", "harness/runtime/distributed_session.py",
           "split_batch(batch, self.plan.mesh.data)[self.replica]", "split_batch(batch, self.plan.mesh.data)[0]",
           DEEPSPEED, "zero_trains and skips"),
    Mutant("a late end of a message that counts as work", "harness/runtime/distributed_session.py",
           "replace(span, start_s=min(start_s, span.end_s))", "span",
           "tests/harness/runtime/test_distributed_session.py", "waiting_for_the_other_end"),
    Mutant("DeepSpeed's messages sent at once", "harness/schedule/builders/deepspeed.py",
           "yield from (Op(j, \"recv\", back, t.part, t.target, t.bytes) for t in following)\n"
           "            if forward in micro_batch_range:\n"
           "                yield from (Op(j, \"send\", forward, t.part, t.target, t.bytes) for t in following)",
           "yield from (Op(j, \"recv\", back, t.part, t.target, t.bytes) for t in following[::-1])\n"
           "            if forward in micro_batch_range:\n"
           "                yield from (Op(j, \"send\", forward, t.part, t.target, t.bytes) for t in following)",
           DEEPSPEED, "runs_its_schedule and skips"),
    Mutant("queues that wait for one arena", "harness/host/malloc.py",
           "_ARENAS if block_bytes < _SMALL else _ONE_ARENA", "_ONE_ARENA",
           "tests/harness/host/test_malloc.py", "arenas_of_their_own"),
    Mutant("blocks that come back in another order", "harness/sbp/strategy_costs.py",
           "return not any(a and b for a, b in zip(undone, split, strict=True))", "return True",
           "tests/harness/sbp/test_shortest_path.py", "residual_branches"),
    Mutant("an all-to-all over too few devices", "harness/sbp/strategy_costs.py",
           "return tuple(abs(a - b) for a, b in zip(source.rows, target.rows, strict=True))",
           "return tuple(max(0, a - b) for a, b in zip(source.rows, target.rows, strict=True))",
           "tests/harness/sbp/test_shortest_path.py", "mixed_paths"),
    Mutant("labels cut off too early", "harness/sbp/bounded_search.py",
           "good &= total < bound + rate * self.limit", "good &= total < bound + 0.9 * rate * self.limit",
           "tests/harness/sbp/test_memory_limit.py", "within_a_limit"),
    Mutant("rings that have a node's port to themselves", "harness/sbp/collective_costs.py",
           "self.grid.local / local * self.sent(size, nodes * local)", "self.sent(size, nodes * local)",
           "tests/harness/sbp/test_collective_costs.py", "table_2"),
    Mutant("blocks in another order that pass for the same", "engines/sbp/block_layout.py",
           "return self.split == other.split and self._cut() == other._cut()", "return self.split == other.split",
           f"{SBP}/test_block_layout.py", "same_blocks"),
    Mutant("rows in strides next to rows in a row", "engines/sbp/program.py",
           "rows = at.rows if axes is None else at.rows.along(axes)", "rows = at.rows",
           f"{SBP}/test_gpt.py", "strides"),
    Mutant("gradients summed in every micro-batch", "engines/sbp/gradient_sync.py",
           "        if self.last:\n", "        if True:\n",
           f"{SBP}/test_training.py", "random and 4"),
    Mutant("gradients of biases that stay apart", "engines/sbp/gradient_sync.py",
           "self.small[shard.sums].append(parameter)", "pass",
           f"{SBP}/test_gpt.py", "planner_splits_it and 2"),
    Mutant("a bias in every partial sum", "engines/sbp/sharded_layers.py",
           "bias is not None and instruction.scatter is not None", "False",
           f"{SBP}/test_gpt.py", "random and 1-4-2"),
    Mutant("a running variance of too few samples", "engines/sbp/sharded_layers.py",
           "variance * (count / max(1, count - 1))", "variance",
           f"{SBP}/test_sharded_layers.py", "batch_norm"),
    Mutant("the first samples' mask for all", "engines/sbp/sharded_layers.py",
           "mask.index_select(n, mine(dim, shape[n], self.by, x.device))",
           "mask.index_select(n, torch.arange(x.shape[n], device=x.device))",
           f"{SBP}/test_sharded_layers.py", "masks"),
    Mutant("a maximum of a device's own classes", "engines/sbp/sharded_cross_entropy.py",
           "self.by.largest(logits.amax(1), self.digits)[:, None]", "logits.amax(1)[:, None]",
           f"{SBP}/test_sharded_cross_entropy.py", "as_torch"),
    Mutant("a loss that every device of its classes adds", "engines/sbp/session.py",
           "self.total += float(loss.detach()) if shown else 0.0", "self.total += float(loss.detach())",
           f"{SBP}/test_training.py", "random and 2"),
    Mutant("heads that are cut by columns", "engines/sbp/sharded_state.py",
           "np.arange(size).reshape(3, self.heads, -1).transpose(1, 0, 2)", "np.arange(size)",
           f"{SBP}/test_sharded_state.py", "heads"),
    Mutant("an axis that comes back in another place", "engines/sbp/block_collectives.py",
           "axes = max((dim.axes for dim in dims), key=len)",
           "axes = tuple(sorted(max((dim.axes for dim in dims), key=len)))",
           f"{SBP}/test_block_collectives.py", "gradients and 8"),
    Mutant("ranks that do not look at each other's plans", "engines/sbp/same_plan.py",
           "if digest != digests[0]", "if False",
           "tests/engines/test_sbp.py", "disagree"),
    Mutant("messages of a step in one micro-batch's traffic", "harness/sbp/route_to_plan.py",
           'times = message.times if message.phase == "weights" else 1', "times = message.times",
           f"{SBP}/test_training.py", "random and 2"),
    Mutant("attention where no head is whole", "harness/sbp/route_to_plan.py",
           "return [first.target.rows] if attended", "return [] if attended",
           f"{SBP}/test_gpt.py", "between_two_moves"),
    Mutant("kernels that count as channels", "harness/sbp/matmul_chain.py",
           "inputs=product.image[0]", "inputs=product.in_",
           "tests/harness/sbp/test_matmul_chain.py", "channels_of_a_convolution"),
    Mutant("a norm that does not see what moves before it", "engines/sbp/shard_model.py",
           'self.begin.pop(name.partition(".")[0], self.at)', "self.at",
           f"{SBP}/test_engine_whole_model.py", "whole"),
    Mutant("a plan that fits is lost", "planners/memory_bisection.py",
           "best, low = min(best, route, key=lambda candidate: candidate.seconds), limit", "low = limit",
           "tests/planners/test_memory_bisection.py"),
    Mutant("a micro-batch more than the limit", "engines/myelin/scheduler.py",
           "range(min(self.limit, self.left // 2))", "range(min(self.limit + 1, self.left // 2))",
           f"{MYELIN}/test_scheduler.py"),
    Mutant("a missing gradient that is the one of before", "engines/myelin/flat_buffers.py",
           "self.views[name].zero_()", "pass",
           f"{MYELIN}/test_optimizer_step_ranks.py"),
    Mutant("sums that overflow float16 unnoticed", "engines/myelin/loss_scale.py",
           " * (1 + numbers.eps / 2) ** (ranks - 1)", "",
           f"{MYELIN}/test_optimizer_step_half.py"),
    Mutant("buckets in one piece", "harness/schedule/builders/myelin.py",
           "for half in (n - n // 2, n // 2) if half", "for half in (n,)",
           f"{MYELIN}/test_optimizer_step.py"),
    Mutant("a search that counts given micro-batches again", "harness/planning/tune/candidates.py",
           "return self.given or max(1,", "return max(1,",
           f"{TUNE}/test_candidates.py"),
    Mutant("a search that refuses in the words of the farthest candidate", "harness/planning/tune/infeasible.py",
           "min(lines, key=distance)", "max(lines, key=distance)",
           f"{TUNE}/test_candidate_search.py", "has_a_fix_that_is"),
    Mutant("an update whose kernels start for free", "harness/simulate/op_durations.py",
           "KERNELS * device.kernel_s if size else 0.0", "0.0",
           "tests/harness/simulate/test_simulate.py"),
)  # fmt: skip


def survives(mutant: Mutant) -> str | None:
    """None if the named test fails under the fault for a good reason, otherwise what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder)
        path = Path(folder) / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"{mutant.file} holds the text to replace {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=30", mutant.test]
        command += ["-k", mutant.only] if mutant.only else []
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 1:
        return None
    return "its test passes" if done.returncode == 0 else f"pytest ended with {done.returncode}:\n{done.stdout[-800:]}"


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    alive = 0
    for mutant in chosen:
        wrong = survives(mutant)
        print(f"{'killed' if wrong is None else 'ALIVE '}  {mutant.name:<50} {mutant.test} {mutant.only}", flush=True)
        if wrong is not None:
            alive += 1
            print(f"        {wrong}")
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
