"""Which files of an inbox make a round, and when they are whole."""

import errno
import itertools
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from port_agent.supervisor.job.inbox import Inboxes
from port_agent.system.directory_handle import read_sample_file
from tests.agent.trees import write_tree


def test_an_inbox_is_open_to_the_group_under_the_umask_of_the_service(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Inboxes(tmp_path / "inbox").create("birds")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "inbox/birds").stat().st_mode) == 0o1770


def test_inbox_waits_until_files_stop_growing(tmp_path: Path) -> None:
    inboxes, job_dir = Inboxes(tmp_path / "inbox"), tmp_path / "job"
    job_dir.mkdir()
    assert inboxes.scan("birds", job_dir).new == ()
    write_tree(tmp_path / "inbox/birds", {"a.wav": "one", ".hidden": "x", "b.wav.part": "x", "empty": ""})
    assert inboxes.scan("birds", job_dir).new == ()  # seen once
    (tmp_path / "inbox/birds/a.wav").write_text("one and more")
    assert inboxes.scan("birds", job_dir).new == ()  # still growing
    assert inboxes.scan("birds", job_dir).new == ("a.wav",)
    first = inboxes.round_directory("birds", job_dir, 1)
    assert [path.name for path in first.iterdir()] == ["a.wav"]
    write_tree(tmp_path / "inbox/birds", {"c.wav": "late"})
    for _ in range(2):
        inboxes.scan("birds", job_dir)
    assert [path.name for path in inboxes.round_directory("birds", job_dir, 1).iterdir()] == ["a.wav"]
    inboxes.finish_round("birds", job_dir, 1)
    assert not inboxes.has_round("birds", job_dir, 2)
    assert inboxes.scan("birds", job_dir).new == ("c.wav",)
    again = Inboxes(tmp_path / "inbox")  # after a restart
    again.scan("birds", job_dir)
    assert again.scan("birds", job_dir).new == ("c.wav",)


def test_a_file_that_changed_after_its_round_is_new(tmp_path: Path) -> None:
    inboxes, job_dir = Inboxes(tmp_path), tmp_path / "job"
    job_dir.mkdir()
    write_tree(tmp_path / "birds", {"log.csv": "1"})
    for _ in range(2):
        inboxes.scan("birds", job_dir)
    inboxes.round_directory("birds", job_dir, 1)
    inboxes.finish_round("birds", job_dir, 1)
    (tmp_path / "birds/log.csv").write_text("1 2 3")
    for _ in range(2):
        state = inboxes.scan("birds", job_dir)
    assert state.new == ("log.csv",)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_grows_during_its_round_is_new(tmp_path: Path, restarted: bool) -> None:
    """The round's files are links: they grow with what is appended to the file in the inbox."""
    inboxes, job_dir = Inboxes(tmp_path), tmp_path / "job"
    job_dir.mkdir()
    write_tree(tmp_path / "birds", {"log.csv": "1", "whole.csv": "7"})
    for _ in range(2):
        inboxes.scan("birds", job_dir)
    taken = inboxes.round_directory("birds", job_dir, 1)
    with open(tmp_path / "birds/log.csv", "a") as stream:
        stream.write(" 2 3")
    assert (taken / "log.csv").read_text() == "1 2 3"
    if restarted:
        inboxes = Inboxes(tmp_path)
    for _ in range(2):
        inboxes.scan("birds", job_dir)
    inboxes.finish_round("birds", job_dir, 1)
    for _ in range(2):
        state = inboxes.scan("birds", job_dir)
    assert state.new == ("log.csv",)
    assert list((job_dir / "rounds").iterdir()) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    inboxes, job_dir = Inboxes(tmp_path / "inbox"), tmp_path / "jobs/1"
    write_tree(tmp_path, {"jobs/1/manifest.json": "{}", "secret.npz": "s", "inbox/birds/a.npz": "a"})
    (tmp_path / "inbox/birds/b.npz").symlink_to(tmp_path / "secret.npz")
    os.mkfifo(tmp_path / "inbox/birds/c.npz")
    for _ in range(2):
        state = inboxes.scan("birds", job_dir)
    assert state.new == ("a.npz",)
    (tmp_path / "inbox/birds/a.npz").unlink()
    (tmp_path / "inbox/birds/a.npz").symlink_to(tmp_path / "secret.npz")  # swapped after it was looked at
    with pytest.raises(OSError, match="not a valid regular file"):
        inboxes.round_directory("birds", job_dir, 1)
    (tmp_path / "inbox/evil").symlink_to("../jobs/1")
    assert "a link, which is not followed" in inboxes.scan("evil", job_dir).error
    for act in (inboxes.create, inboxes.open):
        with pytest.raises(OSError, match="not followed"):
            act("evil")


class Swap:
    """Does something immediately before the n-th call that reaches into a directory."""

    CALLS = ("open", "mkdir", "link", "symlink", "readlink", "stat", "scandir", "fstat", "fchmod")

    def __init__(self, patch: pytest.MonkeyPatch, number: int, swap: Callable[[], None]) -> None:
        self.left, self.swap, self.done = number, swap, False
        for name in self.CALLS:
            patch.setattr(os, name, self._before(getattr(os, name)))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.done = True
                self.swap()
            return call(*arguments, **options)

        return swapped


def _directory_for_link(root: Path) -> None:
    (root / "inbox/birds").rename(root / "inbox/away")
    (root / "inbox/birds").symlink_to(root / "private")


def _file_for_link(root: Path) -> None:
    (root / "inbox/birds/a.npz").unlink()
    (root / "inbox/birds/a.npz").symlink_to(root / "private/a.npz")


@pytest.mark.parametrize("swap", [_directory_for_link, _file_for_link])
@pytest.mark.parametrize("linkable", [True, False])
def test_a_link_put_there_between_any_two_calls_leads_nowhere(
    tmp_path: Path, swap: Callable[[Path], None], linkable: bool
) -> None:
    """A member of the group swaps what it owns for a link while the agent takes a round, and while the worker reads it.

    `linkable`: the kernel lets the agent link that user's files (protected_hardlinks is off).
    """
    for number in itertools.count(1):
        root = tmp_path / str(number)
        write_tree(root, {"private/a.npz": "secret", "inbox/birds/a.npz": "sample"})
        (root / "private").chmod(0o700)
        (root / "job").mkdir()
        inboxes, read = Inboxes(root / "inbox"), []
        with pytest.MonkeyPatch.context() as patch:
            if not linkable:
                patch.setattr(os, "link", _refused)
            raced = Swap(patch, number, partial(swap, root))
            try:
                inboxes.create("birds")
                for _ in range(2):
                    inboxes.scan("birds", root / "job")
                taken = inboxes.round_directory("birds", root / "job", 1)
                for file in taken.iterdir():
                    with read_sample_file(file) as stream:
                        read.append(stream.read())
            except OSError:
                pass
        assert set(read) <= {b"sample"}, f"swapped before call {number}"
        assert stat.S_IMODE((root / "private").stat().st_mode) == 0o700, f"swapped before call {number}"
        if not raced.done:
            assert read == [b"sample"] and number > 10
            return


def _refused(*arguments: Any, **options: Any) -> None:
    raise PermissionError(errno.EPERM, "not permitted")


def test_an_unreadable_inbox_says_so(tmp_path: Path) -> None:
    (tmp_path / "birds").write_text("a file where a directory belongs")
    assert "birds" in Inboxes(tmp_path).scan("birds", tmp_path).error
