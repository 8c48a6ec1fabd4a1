"""Messages by MPI from and into the memory of GPUs, where it says that it takes that, else through the host's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.interfaces import Session
from harness.runtime.transports.transport import Coming, Transport
from tests.engines.myelin.cases import case
from tests.engines.test_stream_order import faults_of
from tests.harness.runtime.transports.test_transport import DATA, M, between, received, sample
from tests.support.fake_machine import MACHINE, range_of
from tests.support.stream_order import HOST

pytestmark = pytest.mark.usefixtures("ranks")


def test_what_mpi_says() -> None:
    """The mpich of PyPI has the extension, and no CUDA."""

    def work(transport: Transport) -> list[bool]:
        from harness.runtime.transports import mpi_transport

        library: Any = mpi_transport.ctypes.CDLL(mpi_transport.MPI.__file__)
        found = [hasattr(library, "MPIX_Query_cuda_support"), mpi_transport.takes_gpu_memory()]
        for library in (SimpleNamespace(MPIX_Query_cuda_support=lambda: 1), SimpleNamespace()):
            mpi_transport.ctypes = SimpleNamespace(CDLL=lambda path, library=library: library)  # type: ignore
            found.append(mpi_transport.takes_gpu_memory())
        return found

    assert between("mpi", work) == [[True, False, True, False]] * 2


@pytest.mark.parametrize(("takes", "device", "staged"), [(True, "cuda:0", False), (False, "cuda:0", True)])
def test_what_a_record_says_of_messages(takes: bool, device: str, staged: bool) -> None:
    def work(transport: Transport) -> Any:
        from harness.runtime.transports import mpi_transport

        mpi_transport.takes_gpu_memory = lambda: takes
        mpi_transport.MPITransport._poll = lambda self: None  # type: ignore[method-assign]  # there is no GPU
        here = mpi_transport.MPITransport(transport.position, [DATA], M, torch.device(device))
        return here.facts["mpi"]

    for found in between("mpi", work):
        assert found["library"].startswith("MPICH ")
        assert (found["takes_gpu_memory"], found["through_the_host"]) == (takes, staged)


def test_memory_that_mpi_takes_by_dlpack() -> None:
    """As it takes that of GPUs."""
    coming = [Coming(i, 2) for i in range(M)]

    def work(transport: Transport) -> int:
        from harness.runtime.transports import mpi_transport

        taken: list[Tensor] = []

        def flat(tensor: Tensor, flat: Any = mpi_transport._flat) -> Tensor:
            taken.append(tensor)
            return flat(tensor)

        mpi_transport._bytes = flat
        transport.begin({channel: coming if channel == DATA else [] for channel in transport.into})
        if transport.position.device == 0:
            for what in coming:
                transport.send(DATA, what, sample(what.micro_batch, 2))
        else:
            found = received(transport, M)
            for what in coming:
                for tensor, wanted in zip(found[DATA, what.micro_batch], sample(what.micro_batch, 2), strict=True):
                    assert torch.equal(tensor, wanted)
        transport.finish()
        return len(taken)

    assert between("mpi", work) == [M * 5 + 1] * 2, "the tensors, and a header"


class World:
    """An MPI world that reads what is sent, and writes what is received, when it is asked to."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def Isend(self, tensor: Tensor, peer: int, tag: int) -> Any:
        MACHINE.order.launch(HOST, "Isend", reads=[range_of(tensor)])
        return self.world.Isend(memory(tensor), peer, tag)

    def Irecv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        MACHINE.order.launch(HOST, "Irecv", writes=[range_of(tensor)])
        return self.world.Irecv(memory(tensor), peer, tag)


def memory(tensor: Tensor) -> Any:
    """What MPI gets where a tensor only says that it is on a GPU; no stream is waited for."""
    with torch._C.DisableTorchFunction():
        return tensor.numpy()


@pytest.mark.parametrize("order", ["message_driven", "1f1b"])
@pytest.mark.parametrize("staged", [False, True])
def test_the_order_of_streams(staged: bool, order: str) -> None:
    """Nothing is sent before a GPU has made it, or received where a GPU still reads."""

    def prepared(session: Session) -> None:
        from harness.runtime.transports import mpi_transport

        transport: Any = session.transport  # type: ignore[attr-defined]
        mpi_transport._bytes = mpi_transport._flat
        transport._world, transport._staged = World(transport._world), staged

    assert faults_of(case("skips", 2, transport="mpi", order=order), prepared=prepared) == []
