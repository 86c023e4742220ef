"""Reads and writes of an open file go past the page cache where the system can."""

import fcntl
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from port_planner.base.direct_io import bypass_page_cache


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has another way")
def test_whole_blocks_come_back_as_written(tmp_path: Path) -> None:
    block = mmap.mmap(-1, 1 << 16)
    block.write(os.urandom(1 << 16))
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as file:
        bypass_page_cache(file.fileno())
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        file.write(block)
        back = mmap.mmap(-1, 1 << 16)
        assert os.preadv(file.fileno(), [back], 0) == 1 << 16
        assert back[:] == block[:]
        if flags & os.O_DIRECT:
            with pytest.raises(OSError, match="Invalid argument"):
                os.pwrite(file.fileno(), b"not aligned", 1)


def test_a_descriptor_without_a_medium_is_left_alone() -> None:
    reading, writing = os.pipe()
    bypass_page_cache(reading)
    os.write(writing, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    os.close(writing)
