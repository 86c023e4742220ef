"""Progress of making a bundle, reported by stage."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the share done, 0 to 1."""


def part_of(progress: Progress, done: int, count: int) -> Progress:
    """Return a progress function for the next of `count` equal parts of a stage, of which `done` are done."""

    def report(stage: str, share: float) -> None:
        progress(stage, (done + share) / count)

    return report


def rounds_of(progress: Progress, stage: str) -> Callable[[int, int], None]:
    """Return a function that reports a stage by rounds: the number done, and their total."""
    return lambda done, total: progress(stage, done / total)
