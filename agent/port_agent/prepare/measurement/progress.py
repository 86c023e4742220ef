"""How far making a bundle is, told by stage."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""


def part_of(progress: Progress, done: int, count: int) -> Progress:
    """Return what reports the next of `count` like parts of a stage, of which so many are `done`."""

    def report(stage: str, share: float) -> None:
        progress(stage, (done + share) / count)

    return report


def rounds_of(progress: Progress, stage: str) -> Callable[[int, int], None]:
    """Return what reports a stage by rounds: so many are done, of so many."""
    return lambda done, total: progress(stage, done / total)
