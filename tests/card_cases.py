"""Programs of the zoo (`benchmarks.follow_zoo`) on the simulated card, within budgets of its memory beside themselves without one."""

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.follow_zoo import children, features
from benchmarks.follow_zoo.compare import Outcome, Program, Verdict, digest, digest_of, first_difference, said, seed
from port_agent import budget
from port_agent.intercept.budget import Report
from port_agent.intercept.residency.refusals import UnsupportedError
from tests.card_programs import followed_card
from tests.simulated_card import NAME

TIMEOUT_S = 120.0
OPERANDS_ONLY = 4096
"""Bytes: less than any tensor that leaves at all."""


@dataclass(frozen=True, slots=True)
class CardCase:
    """A program by name, whose tensors are made on the card; see `benchmarks.follow_zoo.children.Judged`."""

    name: str
    program: Program

    def judged(self, at: Callable[[str], object]) -> Outcome:
        """Run it twice without a budget, at half of what it took, and with everything leaving all the time."""
        at("plain")
        there = followed_card()
        torch.set_default_device(NAME)
        try:
            expected = digest_of(self.program)
        except Exception as error:
            return Outcome(self.name, Verdict.NOT_ELIGIBLE, f"on the card raises {said(error)}")
        peak = there.card_peak()
        if first_difference(expected, digest_of(self.program)):
            return Outcome(self.name, Verdict.NOT_ELIGIBLE, "differs from itself")
        written = 0
        for size in (peak // 2, OPERANDS_ONLY):
            at(f"{size}")
            before = there.card_races()
            try:
                found, report = _digest_within(self.program, size)
            except UnsupportedError as error:
                return Outcome(self.name, Verdict.REFUSED, said(error), f"{size}")
            except Exception as error:
                return Outcome(self.name, Verdict.FAILED, said(error), f"{size}")
            difference = first_difference(expected, found)
            if difference:
                return Outcome(self.name, Verdict.DIFFERS, difference, f"{size}", peak)
            if there.card_races() != before:
                return Outcome(self.name, Verdict.DIFFERS, there.card_last_race().decode(), f"{size}", peak)
            written += 0 if report.device is None else report.device.written_bytes
        return Outcome(self.name, Verdict.EQUAL, "", "", peak, 0, written)


def _digest_within(program: Program, size: int) -> tuple[dict[str, str], Report]:
    seed()
    with budget(gpu_tensors=size) as b:
        result = program()
    found = digest(result)
    del result
    gc.collect()
    return found, b.report


def main(words: list[str]) -> int:
    """Judge each so manieth feature, from one on, but for those of worker processes, in children; print outcomes as JSON, a line each."""
    every, first = map(int, words)
    followed_card()  # before autograd asks how many devices there are; a child must be the first to ask, as it has threads for them
    vars(children)["warm_up"] = bool
    known = sorted(n for n in features.registered() if n not in features.KNOWN_WRONG and not n.startswith("workers/"))
    cases = [CardCase(name, features.registered()[name]) for name in known[first::every]]
    for outcome in children.run_in_children(cases, jobs=1, timeout_s=TIMEOUT_S):
        sys.stdout.write(json.dumps(outcome.as_json()) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
