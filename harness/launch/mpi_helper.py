"""The process that mpiexec starts in place of a rank: it sends its PMI connection to the host and waits until the host
ends it.

A script of its own (`python -S -E mpi_helper.py NAME`, the name of an abstract Unix socket), so that it starts in
milliseconds; see `harness.launch.mpi`.
"""

import json
import os
import socket
import sys

PMI_NAMES = ("PMI", "MPI_", "HYDI_")
"""Prefixes of the variables that mpiexec sets for its processes."""


def main(name: str) -> None:
    variables = {key: value for key, value in os.environ.items() if key.startswith(PMI_NAMES)}
    with socket.socket(socket.AF_UNIX) as host:
        host.connect("\0" + name)
        if "PMI_FD" in variables:
            socket.send_fds(host, [json.dumps(variables).encode()], [int(variables["PMI_FD"])])
            os.close(int(variables["PMI_FD"]))
            host.recv(1)


if __name__ == "__main__":
    main(sys.argv[1])
