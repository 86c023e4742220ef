"""The page file: regions by size, used again, never while a child may read them."""

import os
from pathlib import Path

import pytest

from port_agent.paging.page_space import MIN_FREE_BYTES, ForkedReaders, PageSpace, check_not_in_ram, default_page_dir
from port_agent.paging.pager import PageError


def test_regions_are_used_again_by_size(tmp_path: Path) -> None:
    space = PageSpace(tmp_path)
    first, second = space.take(5000), space.take(5000)
    assert {first.offset, second.offset} == {0, 8192}
    space.give_back(first)
    assert space.take(9000).offset == 16384
    assert space.take(8000).offset == first.offset
    assert list(tmp_path.iterdir()) == []
    space.close()


def test_the_file_grows_as_it_must(tmp_path: Path) -> None:
    space = PageSpace(tmp_path)
    space.take(MIN_FREE_BYTES)
    space.take(1)
    assert os.fstat(space.file.fd).st_size > MIN_FREE_BYTES
    space.close()


@pytest.mark.process
def test_what_a_child_may_read_is_kept_until_it_ends(tmp_path: Path) -> None:
    space = PageSpace(tmp_path)
    before = space.take(4096)
    space.about_to_fork()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        space.became_child()
        os.read(told, 1)
        os._exit(0)
    space.forked()
    after = space.take(4096)
    assert not space.writable(before) and space.writable(after)
    space.give_back(before)
    assert space.take(4096).offset not in (before.offset, after.offset)
    os.write(tell, b".")
    os.waitpid(child, 0)
    assert space.writable(before) and space.take(4096).offset == before.offset
    space.close()


def test_a_child_without_a_sign_of_life_is_taken_to_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    readers = ForkedReaders()
    monkeypatch.setattr(os, "pipe", too_many)
    readers.about_to_fork()
    readers.forked()
    assert readers.may_read(0) and not readers.may_read(1)


def test_where_pages_may_be(tmp_path: Path) -> None:
    assert os.access(default_page_dir(), os.W_OK)
    check_not_in_ram(tmp_path)
    with pytest.raises(PageError, match="choose another --page-dir"):
        PageSpace(tmp_path / "nowhere")
