"""A bar for each stage: what is past is full, what is to come is not there yet, and nobody looks in a pipe."""

import io

import pytest

from port_agent.cli.progress import StageBar


def drawn(bar: StageBar) -> list[tuple[str, float, bool, bool]]:
    """Return name, share, whether it is shown and whether its clock stands, of each stage."""
    tasks = bar._progress.tasks
    return [(task.description, task.completed, task.visible, task.stop_time is not None) for task in tasks]


def test_a_stage_that_begins_completes_those_before() -> None:
    bar = StageBar(("capture", "profile", "plan"))
    assert not any(visible for _, _, visible, _ in drawn(bar))
    bar.update("capture", 0.5)
    assert drawn(bar)[0] == ("capture", 0.5, True, False) and not drawn(bar)[1][2]
    bar.update("plan", 0.25)
    assert drawn(bar) == [("capture", 1.0, True, True), ("profile", 1.0, False, True), ("plan", 0.25, True, False)]
    bar.update("plan", 1.0)
    assert drawn(bar)[2][:2] == ("plan", 1.0)


def test_a_stage_that_nobody_announced_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        StageBar(("capture",)).update("plan", 0.5)


@pytest.mark.parametrize("quiet", [False, True])
def test_into_a_pipe_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with StageBar(("capture",), quiet=quiet) as bar:
        bar.update("capture", 1.0)
    assert pipe.getvalue() == ""
