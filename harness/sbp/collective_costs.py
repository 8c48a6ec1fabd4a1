"""Seconds of collectives: alpha-beta model, in rings (AutoDDL, table 2).

    all_reduce                    2 (k - 1) alpha + 2 (k - 1) / k n beta
    reduce_scatter, all_gather      (k - 1) alpha +   (k - 1) / k n beta
    all_to_all                      (k - 1) alpha +   (k - 1) / k n beta
    broadcast, reduce               (k - 1) alpha +               n beta

k members, n bytes: what a member puts into a reduce_scatter, gets from an all_gather, has in an all_to_all. (The table
prints ceilings for the parentheses.) The last row is this project's: all get n bytes of one member, or give them to it,
in a pipeline from neighbour to neighbour. Each call among several members takes the cluster's `collective_call_s` more.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.cluster import Cluster
from harness.sbp.device_grid import Degree, Grid, grid_of
from harness.simulator.routes import ROOTED, STEPS


@dataclass(frozen=True)
class Collectives:
    """Seconds of collectives in groups of a grid, whose nodes are those of a cluster.

    A group inside a node uses its links. A ring through several nodes leaves each of them once; all such rings, one
    for each device of a node that is no member of this one, share the node's port. An all-to-all is no ring: what the
    devices of a node send to other nodes goes through its port, whatever the group. So one among fewer devices never
    costs more.
    """

    cluster: Cluster
    grid: Grid

    def seconds(self, name: str, degree: Degree, size: float) -> float:
        """Returns the seconds of a collective over the devices of `degree`, with `size` bytes as in the table above."""
        nodes, local = self.grid.parts(degree)
        members, alpha_s, moving_s = nodes * local, 0.0, 0.0
        if local > 1:
            intra = self.cluster.intra
            passing = size if name in ROOTED else self.sent(size, members)
            alpha_s, moving_s = intra.alpha_s, passing * intra.beta_s_per_byte
        if nodes > 1:
            port = self.cluster.node_port
            alpha_s = max(alpha_s, port.alpha_s)
            moving_s = max(moving_s, self._leaving(name, size, nodes, local) * self._port_s_per_byte(name, local))
        call_s = self.cluster.collective_call_s if members > 1 else 0.0
        return call_s + STEPS.get(name, 1) * ((members - 1) * alpha_s + moving_s)

    @classmethod
    def sent_by_all(cls, name: str, size: float, members: int) -> float:
        """Returns the bytes that a member sends in a collective, a mean over all of them."""
        return STEPS.get(name, 1) * cls.sent(size, members)

    def _port_s_per_byte(self, name: str, local: int) -> float:
        """Returns the seconds of a byte through a node's port: one ring alone may have more of it than several."""
        alone = name != "all_to_all" and local == self.grid.local
        return self.cluster.alone_s_per_byte if alone else self.cluster.node_port.beta_s_per_byte

    @staticmethod
    def sent(size: float, members: int) -> float:
        """Returns the bytes that a member sends of `size` bytes in one round."""
        return (members - 1) / members * size

    def _leaving(self, name: str, size: float, nodes: int, local: int) -> float:
        """Returns the bytes through a node's port in one round, of all groups of that many nodes and devices of
        each."""
        if name == "all_to_all":
            return self.grid.local * self.sent(size, nodes)
        if name in ROOTED:
            return self.grid.local / local * size
        return self.grid.local / local * self.sent(size, nodes * local)


def grid_from_cluster(cluster: Cluster, devices: int) -> Grid:
    """Returns the grid of the first `devices` of a cluster. Raises ValueError unless they fill whole nodes."""
    local = min(devices, cluster.devices_per_node)
    if devices % local:
        raise ValueError(f"{devices} devices fill no whole number of nodes of {local}")
    return grid_of(devices // local, local)
