"""What collectives cost: alpha-beta, in rings (AutoDDL, table 2).

    all_reduce                    2 (k - 1) alpha + 2 (k - 1) / k n beta
    reduce_scatter, all_gather      (k - 1) alpha +   (k - 1) / k n beta
    all_to_all                      (k - 1) alpha +   (k - 1) / k n beta

k members, n bytes: what a member puts into a reduce_scatter, gets from an all_gather, has in an all_to_all. (The table
prints ceilings for the parentheses.)
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.cluster import Cluster
from harness.sbp.grid import Degree, Grid
from harness.simulate.routes import STEPS


@dataclass(frozen=True)
class Collectives:
    """Groups of a grid, whose nodes are those of a cluster.

    A group inside of nodes uses their links. A ring through several nodes leaves each of them once; all such rings, one
    for each device of a node that is no member of this one, share the node's port.
    """

    cluster: Cluster
    grid: Grid

    def seconds(self, name: str, degree: Degree, size: float) -> float:
        """Of a collective over the devices of `degree`, with `size` bytes as said above."""
        members = self.grid.size(degree)
        alpha_s, beta = self._link(degree)
        return STEPS[name] * ((members - 1) * alpha_s + self.sent(1, members) * size * beta)

    @staticmethod
    def sent(size: float, members: int) -> float:
        """What a member sends of `size` bytes in one round."""
        return (members - 1) / members * size

    def _link(self, degree: Degree) -> tuple[float, float]:
        """Alpha, and beta for each ring."""
        nodes, local = self.grid.parts(degree)
        intra, port = self.cluster.intra, self.cluster.node_port
        if nodes == 1:
            return intra.alpha_s, intra.beta_s_per_byte
        shared = port.beta_s_per_byte * self.grid.local / local
        if local == 1:
            return port.alpha_s, shared
        return max(port.alpha_s, intra.alpha_s), max(shared, intra.beta_s_per_byte)


def grid_of(cluster: Cluster, devices: int) -> Grid:
    """The grid of the first `devices` of a cluster. Raises ValueError where they fill no whole number of nodes."""
    local = min(devices, cluster.devices_per_node)
    if devices % local:
        raise ValueError(f"{devices} devices fill no whole number of nodes of {local}")
    return Grid(devices // local, local)
