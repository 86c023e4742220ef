"""Which files of an inbox make a round, and when they are whole."""

from pathlib import Path

from agent.supervisor.inbox import Inboxes
from tests.agent.trees import write_tree


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


def test_an_unreadable_inbox_says_so(tmp_path: Path) -> None:
    (tmp_path / "birds").write_text("a file where a directory belongs")
    assert "birds" in Inboxes(tmp_path).scan("birds", tmp_path).error
