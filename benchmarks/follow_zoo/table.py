"""Keep results in a file from which a run continues, and write the table for readers."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.follow_zoo.compare import WRONG, Outcome, Verdict


@dataclass
class Results:
    """Outcomes by name, appended to a file of JSON lines as they come; the last line of a name counts."""

    path: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Return the contents of the file, or nothing if there is none."""
        lines = path.read_text().splitlines() if path.exists() else []
        outcomes = [Outcome.from_json(json.loads(line)) for line in lines]
        return cls(path, {o.name: o for o in outcomes})

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome and append it to the file."""
        self.outcomes[outcome.name] = outcome
        with self.path.open("a") as file:
            file.write(json.dumps(outcome.as_json()) + "\n")

    def compact(self) -> None:
        """Write the file again, sorted, one line per name."""
        lines = [json.dumps(self.outcomes[name].as_json()) for name in sorted(self.outcomes)]
        self.path.write_text("".join(line + "\n" for line in lines))


def counts(outcomes: Iterable[Outcome]) -> str:
    """Return the counts of eligible, equal and wrong programs in one line."""
    by_verdict = Counter(o.verdict for o in outcomes)
    wrong = ", ".join(f"{v.value} {by_verdict[v]}" for v in sorted(WRONG, key=lambda v: v.value) if by_verdict[v])
    refused = f", {by_verdict[Verdict.REFUSED]} refused" if by_verdict[Verdict.REFUSED] else ""
    eligible = sum(n for v, n in by_verdict.items() if v is not Verdict.NOT_ELIGIBLE)
    return (
        f"{eligible} eligible: {by_verdict[Verdict.EQUAL]} equal, {wrong or '0 wrong'}{refused}; "
        f"{by_verdict[Verdict.NOT_ELIGIBLE]} not eligible"
    )


def markdown(title: str, notes: str, outcomes: Iterable[Outcome]) -> str:
    """Return the table: the wrong ones first, the eligible ones, then the others with their reasons."""
    rows = sorted(outcomes, key=lambda o: o.name)
    wrong = [o for o in rows if o.verdict in WRONG]
    equal = [o for o in rows if o.verdict is Verdict.EQUAL]
    refused = [o for o in rows if o.verdict is Verdict.REFUSED]
    others = [o for o in rows if o.verdict is Verdict.NOT_ELIGIBLE]
    lines = [f"# {title}", "", notes, "", counts(rows), ""]
    if wrong:
        lines += ["## Wrong", "", "| name | verdict | budget | what |", "|---|---|---|---|"]
        lines += [f"| {o.name} | {o.verdict.value} | {o.setting} | {_cell(o.detail)} |" for o in wrong] + [""]
    lines += ["## Equal", "", "| name | budgets | tensors KiB | read KiB | written KiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {o.name} | {', '.join(o.settings)} | {o.peak_bytes >> 10} | {o.read_bytes >> 10} | {o.written_bytes >> 10} "
        "|"
        for o in equal
    ]
    if refused:
        lines += ["", "## Refused by name", "", "| name | why |", "|---|---|"]
        lines += [f"| {o.name} | {_cell(o.detail)} |" for o in refused]
    lines += ["", "## Not eligible", "", "| name | why |", "|---|---|"]
    lines += [f"| {o.name} | {_cell(o.detail)} |" for o in others]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:240]
