"""Shared files: read as kept, bounded in size and number, and a damaged one is none."""

import os
from pathlib import Path

import pytest

from port_agent.peers.connection.messages import ANSWER_LIMIT_BYTES
from port_agent.peers.exchange.answers import Topic
from port_agent.peers.exchange.shared_files import MAX_SHARED, SHARED_FOLDER, SharedFileError, SharedFiles

NAME = "ab" * 32


def test_read_as_kept_and_nothing_else(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    assert files.read(Topic.PLAN, NAME) is None
    for content in (b"a plan", b"line\nby\nline", b"x" * ANSWER_LIMIT_BYTES):
        files.keep(Topic.PLAN, NAME, content)
        assert files.read(Topic.PLAN, NAME) == content and files.read(Topic.COSTS, NAME) is None
    for content in (b"", b"x" * (ANSWER_LIMIT_BYTES + 1)):
        with pytest.raises(SharedFileError, match="between 1 and 1048576 are shared"):
            files.keep(Topic.PLAN, NAME, content)


def test_no_flipped_bit_is_shared(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    files.keep(Topic.COSTS, NAME, b"what operators cost")
    path = tmp_path / SHARED_FOLDER / "costs" / NAME
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert files.read(Topic.COSTS, NAME) is None
    path.write_bytes(whole[:-1])
    assert files.read(Topic.COSTS, NAME) is None


def test_the_oldest_go(tmp_path: Path) -> None:
    files = SharedFiles(tmp_path)
    for number in range(MAX_SHARED + 3):
        files.keep(Topic.PLAN, f"{number:064x}", b"a plan")
        os.utime(tmp_path / SHARED_FOLDER / "plan" / f"{number:064x}", (number, number))
    kept = sorted(int(path.name, 16) for path in (tmp_path / SHARED_FOLDER / "plan").iterdir())
    assert kept == list(range(3, MAX_SHARED + 3))
