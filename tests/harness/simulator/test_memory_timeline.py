from dataclasses import replace

from harness.core.cluster import Cluster, Link
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.op import Op
from harness.core.plan import Mesh, Plan, Stage
from harness.core.products import Product
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.data_parallel import data_parallel
from harness.schedule.builders.deepspeed import deepspeed
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.single import single
from harness.schedule.transfers import plan_transfers
from harness.simulator import simulate
from harness.simulator.memory_timeline import working_bytes

SAVED = MemoryModel(weights=2.0, gradients=0.0)  # no gradients: nothing is added to them
INPUTS = MemoryModel("inputs", activations="inputs")
STATE = 2 * 1000 + 5  # weights and gradients of 1000 bytes, buffers of 5


def profile_of(layers: int, skips: tuple[Skip, ...] = ()) -> ModelProfile:
    """Layers that save 100 bytes (their input of 10 among them), on an input of 10."""
    layer = LayerProfile("", 1, 2, param_bytes=1000, buffer_bytes=5, output_bytes=10, saved_bytes=100)
    return ModelProfile((layer,) * layers, input_bytes=10, skips=skips)


def peaks(m: int, n: int, recompute: str, memory: MemoryModel, skips: tuple[Skip, ...] = (), **options: bool):
    """Of n stages of one layer; copies take no time."""
    profile = profile_of(n, skips)
    plan = Plan.contiguous((1,) * n, m, recompute)
    transfers = plan_transfers(plan, profile, options.pop("portals", True))
    schedule = gpipe(m, range(n), transfers, recompute, **options)
    return simulate(schedule, plan, profile, Cluster(devices_per_node=n), memory).figures["peak_memory_bytes"]


def test_where_only_inputs_count_gpipe_keeps_those_of_every_micro_batch():
    assert peaks(4, 2, "never", INPUTS) == [STATE + 4 * 10] * 2


def test_where_only_inputs_count_recomputation_adds_those_of_one_micro_batch():
    assert peaks(4, 2, "always", INPUTS) == [STATE + 4 * 10 + 10] * 2


def test_all_that_is_saved_is_kept_until_the_backward_pass():
    """The mini-batch is on the first device, inputs that were copied on the others, the output on the last."""
    assert peaks(4, 3, "never", SAVED) == [
        STATE + 4 * 10 + 4 * 90 + 10,  # batch, saved without it, gradient of the output
        STATE + 4 * 10 + 4 * 90 + 20,  # copies, saved without them, gradients of output and input
        STATE + 4 * 10 + 4 * 90 + 4 * 20 + 20,  # and the gathered outputs with their gradients
    ]


def test_recomputation_keeps_inputs_and_the_saved_tensors_of_one_micro_batch():
    assert peaks(4, 2, "always", SAVED) == [STATE + 4 * 10 + 90 + 10, STATE + 4 * 10 + 90 + 4 * 20 + 20]
    # the last micro-batch is not recomputed: what it saved is gone before the next one saves anything
    assert peaks(4, 2, "except_last", SAVED) == peaks(4, 2, "always", SAVED)


def test_without_the_dependency_all_recomputations_come_first_and_the_peak_rises():
    assert peaks(4, 1, "always", SAVED, dependency=False)[0] - peaks(4, 1, "always", SAVED)[0] == 3 * 90


def test_what_streams_of_copies_have_freed_serves_no_other_one():
    """Four micro-batches on two devices: device 1 keeps their inputs, 10 each, and has one gradient at a time; device 0
    gets the gradients, 10 each, one at a time, too. A pool for each micro-batch keeps its own."""

    def reserved(**options) -> list[int]:
        profile = profile_of(2)
        plan = Plan.contiguous([1, 1], 4, "never")
        schedule = gpipe(4, range(2), plan_transfers(plan, profile, True), "never", **options)
        done = simulate(schedule, plan, profile, Cluster(devices_per_node=2, intra=Link(0.5, 0.0)), SAVED)
        assert [peak.bytes for peak in done.peaks] == done.figures["peak_memory_bytes"]
        return [peak.reserved - peak.bytes for peak in done.peaks]

    assert reserved(streams=False) == [0, 0], "one pool has them all"
    first, last = reserved()
    assert first == 3 * 10, "of four gradients one is there when the memory is fullest"
    assert last == 0, "all four inputs are"


def test_a_skip_is_kept_where_it_is_popped_and_its_gradient_where_it_was_stashed():
    skip = (Skip(0, 2, 40, "s"),)
    without, with_skip = peaks(2, 3, "always", SAVED), peaks(2, 3, "always", SAVED, skip)
    # the gradients of both micro-batches come before the first one's backward task has ended
    assert [b - a for a, b in zip(without, with_skip, strict=True)] == [2 * 40, 0, 2 * 40]


def test_without_portals_a_skip_is_kept_by_the_stages_in_between_too():
    skip = (Skip(0, 2, 40, "s"),)
    without, with_skip = peaks(2, 3, "always", SAVED), peaks(2, 3, "always", SAVED, skip, portals=False)
    assert [b - a for a, b in zip(without, with_skip, strict=True)][1] >= 2 * 40


def test_on_one_device_nothing_is_copied_and_one_micro_batch_is_alive():
    profile = profile_of(3)
    for m in (1, 4):
        plan = Plan(Mesh(), (Stage(0, 2, 0),), m)
        figures = simulate(single(m), plan, profile, Cluster(), SAVED).figures
        assert figures["peak_memory_bytes"] == [3 * STATE + m * 10 + (300 - 10) + 10 + 20]


def test_two_stages_on_one_device_keep_what_no_copy_brought():
    profile = profile_of(2)
    plan = Plan(Mesh(), (Stage(0, 0, 0), Stage(1, 1, 0)), 2, "always")
    schedule = gpipe(2, [0, 0], plan_transfers(plan, profile, True), "always")
    figures = simulate(schedule, plan, profile, Cluster(), SAVED).figures
    # batch, inputs of stage 1, outputs with gradients, saved by one task, gradients of its output and input
    assert figures["peak_memory_bytes"] == [2 * STATE + 2 * 10 + 2 * 10 + 2 * 20 + 100 + 20]


def test_the_working_set_walks_back_through_the_layers():
    """
    layer          0      1      2        saved 5, 50, 1, outputs 8, 20, 30, input 7
    at layer 2                   30 + 20                                    = 50
    at layer 1            20 + 8                less 1 that layer 2 freed   = 27
    at layer 0      8                           less 51                     < 0
    """
    sizes = ((5, 8), (50, 20), (1, 30))
    layers = tuple(LayerProfile("", saved_bytes=saved, output_bytes=output) for saved, output in sizes)
    assert working_bytes(ModelProfile(layers, input_bytes=7), 0, 2) == 50
    assert working_bytes(ModelProfile(layers, input_bytes=7), 0, 1) == 28
    assert working_bytes(ModelProfile(layers, input_bytes=7), 0, 0) == 8
    # a skip inside the stage has a gradient too, which waits from its pop to its stash
    skipping = ModelProfile(layers, input_bytes=7, skips=(Skip(0, 2, 100, "s"),))
    assert working_bytes(skipping, 0, 2) == 150
    assert working_bytes(skipping, 0, 1) == 28
    # what a layer works with beyond its gradients is allocated while it goes back, in addition to what is not freed by
    # then
    busy = ModelProfile((layers[0], replace(layers[1], working_bytes=40), layers[2]), input_bytes=7)
    assert working_bytes(busy, 0, 2) == 20 + 8 + 40 - 1


def test_a_gradient_coexists_with_the_one_that_it_is_added_to():
    """Saved 5 and 50, outputs 8 and 20, parameters 1000 and 3000; nothing is freed before layer 1 has its gradient."""
    layers = tuple(
        LayerProfile("", 1, 2, saved_bytes=s, output_bytes=o, param_bytes=p)
        for s, o, p in ((5, 8, 1000), (50, 20, 3000))
    )
    profile = ModelProfile(layers, input_bytes=7)
    assert working_bytes(profile, 0, 1, accumulated=1.0) == 20 + 8 + 3000
    assert working_bytes(profile, 0, 1, accumulated=0.5) == 20 + 8 + 1500
    assert working_bytes(profile, 0, 1) == 20 + 8
    state = 2 * 4000
    for m, added in ((1, 0), (2, 3000)):  # the first backward task finds no gradient
        plan = Plan(Mesh(), (Stage(0, 1, 0),), m)
        figures = simulate(single(m), plan, profile, Cluster(), MemoryModel()).figures
        assert figures["peak_memory_bytes"] == [state + m * 7 + (55 - 5) + 20 + 20 + 8 + added]


def test_the_peak_says_when_it_is_and_what_it_holds():
    profile = profile_of(2)
    plan = Plan.contiguous([1, 1], 3, "never")
    schedule = gpipe(3, [0, 1], plan_transfers(plan, profile, True), "never")
    done = simulate(schedule, plan, profile, Cluster(devices_per_node=2), MemoryModel())
    for peak, size in zip(done.peaks, done.figures["peak_memory_bytes"], strict=True):
        assert sum(peak.contents.values()) == peak.bytes == size
        assert 0 <= peak.at_s <= done.figures["step_time_s"]
    assert done.peaks[0].contents["mini-batch"] == 3 * profile.input_bytes
    assert done.peaks[1].contents["received"] == 2 * profile.boundary_bytes(1)  # at the second backward task


def test_what_waits_for_its_link_is_kept_by_its_sender():
    """Stage 0 makes 4 outputs of 10 bytes, 1 s each; each takes 5 s on the link, one after the other."""
    layer = LayerProfile("", 1, 2, output_bytes=10)
    profile, plan = ModelProfile((layer, layer)), Plan.contiguous([1, 1], 4)
    schedule = gpipe(4, [0, 1], plan_transfers(plan, profile, True), "never")
    for beta, waiting in ((0.0, None), (0.5, 40)):  # 1 in flight, 3 after it
        cluster = Cluster(devices_per_node=2, intra=Link(0, beta))
        peak = simulate(schedule, plan, profile, cluster, SAVED).peaks[0]
        assert peak.contents.get("to be sent") == waiting


def test_saved_tensors_wait_for_the_gradients_of_the_weights():
    layer = LayerProfile("", 1, 2, saved_bytes=100)
    profile, plan = ModelProfile((layer,)), Plan.contiguous([1], 2)
    early = tuple(Op.parse(text) for text in ["0F0", "0B0", "0W0", "0F1", "0B1", "0W1"])
    late = tuple(Op.parse(text) for text in ["0F0", "0B0", "0F1", "0B1", "0W0", "0W1"])
    for ops, kept in ((early, 100), (late, 200)):
        done = simulate(Schedule((QueueOps(0, "compute", ops),), (0,)), plan, profile, Cluster(), SAVED)
        assert done.peaks[0].contents["saved"] == kept
        assert done.figures["step_time_s"] == 2 * 3  # each of B and W takes half of the backward pass


def test_what_tied_layers_share_counts_once_on_a_device():
    """The head has a bias of its own. The whole model is 1014 bytes, and as much again of gradients."""
    tied = (Tied("e.weight", 1000),)
    embedding = LayerProfile("e", 1, 2, param_bytes=1000, tied=tied)
    head = LayerProfile("h", 1, 2, param_bytes=1004, tied=tied)
    profile = ModelProfile((embedding, LayerProfile("m", 1, 2, param_bytes=10), head))
    assert MemoryModel().state_bytes(profile, 0, 2) == 2 * 1014
    assert MemoryModel().state_bytes(profile, 1, 2) == 2 * 1014  # on another device it has a copy
    for devices, weights in (((0, 1, 2), [1000, 10, 1004]), ((0, 1, 0), [1004, 10])):
        stages = tuple(Stage(number, number, device) for number, device in enumerate(devices))
        plan = Plan(Mesh(1, len(set(devices)), 1), stages, 1)
        schedule = gpipe(1, list(devices), plan_transfers(plan, profile, True), "never")
        done = simulate(schedule, plan, profile, Cluster(devices_per_node=3), MemoryModel())
        assert [peak.contents["weights"] for peak in done.peaks] == weights
    assert profile.parameter_bytes(0, 0) == 1000


def held_by_messages(messages: str, m: int) -> list[dict[str, int]]:
    """Of two stages of one layer, by what is done with their messages of 10 bytes: the peak of each."""
    profile, plan = profile_of(2), Plan.contiguous((1, 1), m)
    schedule = deepspeed(m, range(2), plan_transfers(plan, profile, False))
    memory = replace(SAVED, messages=messages)
    seconds = dict.fromkeys(map(str, schedule.ops()), 1.0)
    return [peak.contents for peak in simulate(schedule, plan, profile, Cluster(), memory, durations=seconds).peaks]


def test_messages_in_buffers_that_stay():
    """One for each micro-batch and direction; what passes through them is nowhere else."""
    passing, kept = held_by_messages("passing", 5), held_by_messages("kept", 5)
    assert "buffers of messages" not in passing[1] and passing[1]["received"] == 10
    for contents in kept:
        assert contents["buffers of messages"] == 5 * 10 and "received" not in contents
    assert (passing[1]["outputs"], kept[1]["outputs"]) == (10, 20)


def test_messages_that_are_copied_out_of_one_buffer():
    """The last stage is fullest in a forward task: its own input and two earlier ones, of which it has forgotten
    nothing, a copy for this task; and the gradients of the two."""
    first, last = held_by_messages("copied", 5)
    assert (first["buffers of messages"], last["buffers of messages"]) == (10, 10)
    assert (last["received"], last["to be sent"], last["outputs"], last["saved"]) == (40, 20, 30, 100)
    assert first["to be sent"] == 2 * 10, (
        "two micro-batches are under way, whose outputs stay until their backward task"
    )


def test_gradients_that_are_summed_lie_in_a_bucket_meanwhile():
    profile, plan = profile_of(1), replace(Plan.contiguous((1,), 2), mesh=Mesh(data=2))
    schedule = data_parallel(2, 1000, 2)
    memory, cluster = replace(SAVED, reducing=1.5), Cluster(devices_per_node=2, intra=Link(0.0, 0.01))
    assert simulate(schedule, plan, profile, cluster, memory).peaks[0].contents["reducing"] == 1500
    assert "reducing" not in simulate(single(2), plan, profile, cluster, memory).peaks[0].contents


def test_what_was_measured_of_a_backward_pass_counts():
    """Beyond the gradient of the layer's output, 20 bytes; layer 2 has freed 1 by then. Where gradients are kept that
    there were not, the new one is none next to an old one, but all stay."""
    product = Product("w", weight_bytes=16)
    layers = (
        LayerProfile("", saved_bytes=5, output_bytes=8),
        LayerProfile("", saved_bytes=50, output_bytes=20, param_bytes=24, backward_bytes=90, products=(product,)),
        LayerProfile("", saved_bytes=1, output_bytes=30, backward_bytes=2),
    )
    profile = ModelProfile(layers, input_bytes=7)
    assert working_bytes(profile, 0, 2, accumulated=1.0) == 20 + 90 - 1
    assert working_bytes(profile, 0, 2) == 20 + 90 - 16 - 1
    assert working_bytes(profile, 0, 2, kept=1.0) == 20 + 90 - 16 + 24 - 1
    assert working_bytes(profile, 2, 2) == 30 + 20, "the gradient of the input is there at least"
    skips = (Skip(0, 1, 40, "popped"), Skip(0, 2, 7, "later"))
    skipping = replace(profile, skips=skips)  # what layer 1 makes is part of its 90; what layer 2 has made waits
    assert working_bytes(skipping, 0, 2, accumulated=1.0) == 20 + 7 + 90 - 1
    assert working_bytes(
        replace(skipping, layers=(layers[0], replace(layers[1], backward_bytes=30), layers[2])), 0, 1
    ) == (20 + 8 + 40)


def test_gradients_that_are_there_twice_between_two_steps():
    profile, plan = profile_of(1), replace(Plan.contiguous((1,), 2), mesh=Mesh(data=2))
    schedule, cluster = data_parallel(2, 1000, 2), Cluster(devices_per_node=2, intra=Link(0.0, 0.01))
    once = simulate(schedule, plan, profile, cluster, SAVED).peaks[0]
    (peak,) = simulate(schedule, plan, profile, cluster, replace(SAVED, rebuilt=1.0)).peaks
    assert peak.contents["reducing"] == 1000 and peak.at_s == 0 and "saved" not in peak.contents
    assert peak.bytes == 3 * 1000 + 5 + 2 * profile.input_bytes > once.bytes  # 5 of buffers
    assert simulate(schedule, plan, profile, cluster, replace(SAVED, rebuilt=1e-3)).peaks[0] == once


def test_gradients_that_wait_for_those_of_the_weights():
    """Of the outputs of products with weights, 4 bytes each: 3 samples, 5 rows, 7 features. Else of the layer."""
    product, score = Product("w", rows_per_sample=5, out=7, weight_bytes=4), Product("scores", "attention", 5, 7, 7)
    layers = (
        LayerProfile("first", param_bytes=4, output_bytes=1000),
        LayerProfile("block", param_bytes=4, output_bytes=10, products=(product, score, product)),
        LayerProfile("norm", param_bytes=4, output_bytes=100),
        LayerProfile("relu", output_bytes=1000),
    )
    profile = ModelProfile(layers, micro_batch=3)
    assert MemoryModel().delayed_bytes(profile, 1, 3) == 2 * 3 * 5 * 7 * 4 + 100
    assert MemoryModel().delayed_bytes(profile, 0, 3) == 0, "nobody needs the gradient of the input"
