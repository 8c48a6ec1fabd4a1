from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from harness.core import files
from tests.support.full_disk import full_disk


def test_writes_make_folders_and_replace(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    files.write_text(path, "eins")
    files.write_text(path, "zwölf")
    assert path.read_bytes() == "zwölf".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [found.name for found in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("before", [None, b"the old one"])
def test_a_full_disk_leaves_the_old_file_or_none(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with full_disk(1000), pytest.raises(OSError, match="File too large"):
        files.write_bytes(path, bytes(100_000))
    assert (path.read_bytes() if path.exists() else None) == before
    assert len(list(tmp_path.iterdir())) == (before is not None)


def test_a_folder_in_the_way_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "file" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        files.write_text(tmp_path / "file", "text")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Two writers take turns; whatever is read is one of the two texts, whole."""
    path, texts, seen = tmp_path / "file", {"a" * 200_000, "b" * 300_000}, set()
    files.write_text(path, min(texts))
    writers = [threading.Thread(target=lambda t=t: [files.write_text(path, t) for _ in range(20)]) for t in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.add(path.read_text())
    assert seen <= texts
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_file_that_no_document_can_be_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(OSError, match=r"has 3.0 GiB, at most 64.0 MiB are read: '.*huge'"):
        files.read_bytes(tmp_path / "huge")
    (tmp_path / "more").write_bytes(bytes(9))
    assert files.read_bytes(tmp_path / "more", 9) == files.read_bytes(tmp_path / "more", None) == bytes(9)
    with pytest.raises(OSError, match="has 9 B, at most 8 B are read"):
        files.read_bytes(tmp_path / "more", 8)


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A FIFO would wait for a writer, a device has no end."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="is not a regular file"):
            files.read_bytes(path)
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path)
