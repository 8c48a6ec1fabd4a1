"""Other names that an engine has for degrees of the mesh, as its paper calls them. Does not import torch."""

from __future__ import annotations

from omegaconf import DictConfig

from harness import registry
from harness.problem import Problem


def follow(config: DictConfig) -> list[Problem]:
    """Write engine.NAME into mesh.DEGREE for each of the engine's `DEGREES` that is given; a problem for two numbers.

    `mesh.*` is the truth: nothing else reads the other names.
    """
    found = []
    schema = registry.schemas().get(("engine", config.engine.name))
    for name, degree in getattr(schema, "DEGREES", {}).items():
        given, there = config.engine[name], config.mesh[degree]
        if given is not None and there is not None and given != there:
            what = f"is another name of mesh.{degree}, which is {there}"
            found.append(Problem(f"engine.{name} {given}", what, f"engine.{name}={there}, or without it"))
        elif given is not None:
            config.mesh[degree] = given
    return found
