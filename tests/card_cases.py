"""Programs of the zoo (`benchmarks.follow_zoo`) on the simulated card, within budgets of its memory beside themselves without one."""

import json
import sys
from typing import Any

from benchmarks.follow_zoo import features
from benchmarks.follow_zoo.children import run_in_children
from benchmarks.follow_zoo.on_device import DeviceCase
from tests.card_programs import followed_card
from tests.simulated_card import NAME

TIMEOUT_S = 120.0


def _violated(there: Any) -> str:
    return f"{there.card_races()} races, last {there.card_last_race().decode()}" if there.card_races() else ""


def main(words: list[str]) -> int:
    """Judge each so manieth feature, from one on, but for those of worker processes, in children; print outcomes as JSON, a line each."""
    every, first = map(int, words)
    there = (
        followed_card()
    )  # before autograd asks how many devices there are; a child must be the first to ask, as it has threads for them
    known = sorted(n for n in features.registered() if n not in features.KNOWN_WRONG and not n.startswith("workers/"))
    cases = [
        DeviceCase(name, features.registered()[name], NAME, lambda: _violated(there)) for name in known[first::every]
    ]
    for outcome in run_in_children(cases, jobs=1, timeout_s=TIMEOUT_S, on_device=True):
        sys.stdout.write(json.dumps(outcome.as_json()) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
