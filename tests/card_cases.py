"""Programs of the zoo (`benchmarks.follow_zoo`) on the simulated card, within budgets of its memory
beside themselves without one.
"""

import json
import sys
from typing import Any

from benchmarks.follow_zoo import features
from benchmarks.follow_zoo.children import Case, run_in_children
from benchmarks.follow_zoo.on_device import DeviceCase
from benchmarks.zoo import cases_of
from tests.card_programs import followed_card
from tests.simulated_card import NAME

TIMEOUT_S = 120.0
PROGRAMS = 300
"""Random ones that there are."""


def _violated(there: Any) -> str:
    return f"{there.card_races()} races, last {there.card_last_race().decode()}" if there.card_races() else ""


def cases(kind: str, every: int, first: int) -> list[DeviceCase]:
    """Return each so manieth program of a kind, from one on, but for those of worker processes."""
    there = (
        followed_card()
    )  # before autograd asks how many devices there are; a child must be the first to ask, as it has threads for them
    programs = {c.name: c.program for c in cases_of(kind, PROGRAMS, 0) if isinstance(c, Case)}
    known = sorted(n for n in programs if n not in features.KNOWN_WRONG and not n.startswith("workers/"))
    return [DeviceCase(name, programs[name], NAME, lambda: _violated(there)) for name in known[first::every]]


def main(words: list[str]) -> int:
    """Judge programs of a kind in children; print outcomes as JSON, a line each.

    Words: features, programs or zoo; every; first.
    """
    kind, every, first = words[0], int(words[1]), int(words[2])
    for outcome in run_in_children(cases(kind, every, first), jobs=1, timeout_s=TIMEOUT_S, on_device=True):
        sys.stdout.write(json.dumps(outcome.as_json()) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
