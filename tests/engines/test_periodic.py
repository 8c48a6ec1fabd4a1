"""The contract of tests/engines/contract.py for the periodic engine, with one update a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.periodic.engine import Config
from engines.periodic.engine import build as build_periodic
from harness.interfaces import Model, OptimizerSpec
from planners.block_partition import even
from tests.engines import contract, networks, zoo
from tests.engines.contract import Case, gentle
from tests.engines.periodic.patterns import plan
from tests.tiers import short_soak

UNTIED = ["skips", "pairs", "tokens", "norms"]
ZOO = [name for name in zoo.SIZES if name != "gpt"]
SCALARS = 64
"""Bytes of losses, which the engines keep at other times."""
PLACES = {1: [0], 2: [0, 1], 3: [0, 1, 0], 4: [0, 1, 0, 1]}
"""Devices of so many stages: some have two."""


def model(name: str) -> Model:
    return networks.ALL[name] if name in networks.ALL else zoo.model(name)


def case(name: str, stages: int = 2, micro_batches: int = 4, devices: list[int] | None = None, slack: int = 0) -> Case:
    network = model(name)
    chosen = plan(even(len(network.layers()), stages), micro_batches, devices or [], slack)
    return Case(build_periodic(Config(update_every=micro_batches)), network, chosen)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", UNTIED)
def test_it_trains_like_single(name: str, stages: int) -> None:
    contract.check_training(case(name, stages))


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("name", UNTIED)
def test_a_device_has_several_stages(name: str, stages: int) -> None:
    folded = case(name, stages, devices=PLACES[stages])
    contract.check_training(folded)
    contract.check_trace(folded)


@pytest.mark.parametrize("name", ["shared", "tied"])
def test_layers_of_one_stage_share_parameters(name: str) -> None:
    contract.check_training(case(name, 1))


@pytest.mark.fast
@pytest.mark.parametrize("name", short_soak(ZOO, zoo.HEAVY))
def test_it_trains_the_zoo_like_single(name: str) -> None:
    contract.check_training(gentle(case(name, 3, devices=PLACES[3])))


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize("name", UNTIED)
def test_in_float32(name: str, dropout: bool) -> None:
    contract.check_training(
        replace(case(name, 3), dtype="float32", dropout=dropout, optimizer=OptimizerSpec("sgd", lr=0.1))
    )


@pytest.mark.parametrize("samples", [7, 3])
def test_uneven_micro_batches_and_more_of_them_than_samples(samples: int) -> None:
    contract.check_training(replace(case("skips", 2, 5), samples=samples))


@pytest.mark.parametrize("name", ["pairs", "tokens", "mlp"])
def test_states_move_between_engines(name: str) -> None:
    contract.check_state_moves(case(name, 3))


@pytest.mark.parametrize("name", ["skips", "pairs", "unet"])
@pytest.mark.parametrize("slack", [0, 2])
def test_it_runs_its_schedule(name: str, slack: int) -> None:
    contract.check_trace(case(name, 4, slack=slack))


@pytest.mark.parametrize("layer", [1, 5, 13])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_crash_in_any_stage_reaches_the_caller(layer: int, stages: int) -> None:
    contract.check_crash(case("skips", stages, devices=PLACES[stages]), layer)


def test_it_accepts_what_it_is_tested_with() -> None:
    contract.check_accepts(case("skips", 3, devices=PLACES[3]))


def test_autocast_is_that_of_single() -> None:
    mine = case("mlp", 3, devices=PLACES[3])
    losses = []
    for one in (mine, mine.reference):
        spec = replace(one.spec, dtype="float32", autocast="bfloat16")
        with one.engine.session(one.model, one.plan, spec) as session:
            torch.manual_seed(3)
            losses.append([session.step(one.model.sample(8)).loss for _ in range(3)])
    assert losses[0] == losses[1]


def test_bytes_sent_are_those_of_gpipe() -> None:
    """Here a message has all that crosses a cut, skips included."""
    mine = case("skips", 3)
    theirs = replace(mine, engine=build_gpipe(GPipeConfig(portals=False, checkpoint="never")))
    sent = []
    for one in (mine, theirs):
        with one.engine.session(one.model, one.plan, one.spec) as session:
            sent.append(session.step(one.model.sample(8)).bytes_sent)
    both = {"activations": ("activations", "skips"), "gradients": ("gradients", "skip_gradients")}
    assert sent[0] == {kind: sum(sent[1][part] for part in parts) for kind, parts in both.items()}
    assert min(sent[1].values()) > 0


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", ["unet", "mlp"])
def test_memory_is_that_of_single_and_a_second_version_of_the_weights(name: str, micro_batches: int) -> None:
    mine = case(name, 1, micro_batches)
    peaks = []
    for one in (mine, mine.reference):
        with one.engine.session(one.model, one.plan, one.spec) as session:
            batch = one.model.sample(8)
            session.step(batch)
            peaks.append(session.step(batch, meter=True).peak_memory_bytes[0])
    own = sum(p.nbytes for p in mine.model.layers().to(torch.float64).parameters())
    assert abs(peaks[0] - peaks[1] - own) <= SCALARS
