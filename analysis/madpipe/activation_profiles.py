"""`python -m analysis.madpipe.activation_profiles`: makes the profiles of sweeps/madpipe_activations.yaml.

The paper prints no profile. So its claims on memory are checked with other sizes, too: of what a layer stores and sends
(the paper has one number a_l for both), with the same times and weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from analysis.madpipe.sweep_results import NETWORKS, PERCENTS
from harness.config import registry
from harness.core.model_profile import LayerProfile, ModelProfile

PROFILES = registry.ROOT / "sweeps" / "profiles"


def main(arguments: Sequence[str]) -> int:
    """Writes a file for each network and size; returns 0."""
    description = (__doc__ or "").split("\n")[0]
    argparse.ArgumentParser("python -m analysis.madpipe.activation_profiles", description=description).parse_args(
        arguments
    )
    for network in NETWORKS:
        original = ModelProfile.load(PROFILES / f"{network}_1000.json")
        for percent in PERCENTS:
            scaled(original, percent).save(path(network, percent))
    return 0


def path(network: str, percent: int) -> Path:
    """Returns the file of a network whose activations have this percentage of their size."""
    return PROFILES / f"{network}_1000_activations_{percent}.json"


def scaled(profile: ModelProfile, percent: int) -> ModelProfile:
    """Returns the profile with other activations. It has only what planners read: times, and bytes of the layers."""
    layers = tuple(
        LayerProfile(
            layer.name,
            layer.forward_s,
            layer.backward_s,
            param_bytes=layer.param_bytes,
            buffer_bytes=layer.buffer_bytes,
            output_bytes=layer.output_bytes * percent // 100,
        )
        for layer in profile.layers
    )
    source = f"{profile.source}; activations {percent} % of theirs"
    return replace(profile, layers=layers, input_bytes=profile.input_bytes * percent // 100, source=source)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
