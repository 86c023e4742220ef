"""Where attacks work that write and sync small files thousands of times."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 32 << 20


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Give an empty directory, in memory where there is room: nothing here is about the medium,
    and syncing takes longest.
    """
    if not _IN_MEMORY.is_dir() or shutil.disk_usage(_IN_MEMORY).free < _ROOM_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY) as folder:
        yield Path(folder)
