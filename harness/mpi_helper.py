"""What mpiexec starts in a rank's place: it hands its wires to the host and waits until that lets go of it.

A script of its own (`python -S -E mpi_helper.py NAME`, that of an abstract Unix socket), so that it starts in
milliseconds; see `harness.mpi`.
"""

import json
import os
import socket
import sys

NAMES = ("PMI", "MPI_", "HYDI_")
"""How the names of what mpiexec tells its processes begin."""


def main(name: str) -> None:
    told = {key: value for key, value in os.environ.items() if key.startswith(NAMES)}
    with socket.socket(socket.AF_UNIX) as host:
        host.connect("\0" + name)
        if "PMI_FD" in told:
            socket.send_fds(host, [json.dumps(told).encode()], [int(told["PMI_FD"])])
            os.close(int(told["PMI_FD"]))
            host.recv(1)


if __name__ == "__main__":
    main(sys.argv[1])
