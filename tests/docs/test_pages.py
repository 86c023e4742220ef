"""Links lead somewhere, README is short, and what left it is found where it went."""

import re
from pathlib import Path

import pytest

from port_agent.cli import build_parser
from port_agent.cli.manual import command_helps
from tests.docs.pages import ROOT, documents, headings, linked

MAX_README_LINES = 150
MAX_LINE = 160
MAX_ENTRY = 200
"""Characters of an entry of the changelog."""
CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")

MOVED = {
    "docs/how-to/run-a-script.md": ("--opportunistic", "--guard-only", "--no-recompute", "--step-deadline 1.5s", "PlanRequest", "torchrun"),
    "docs/how-to/plan-a-bundle.md": (
        "port_job()", "TrainingJob.buckets", "16 kinds", "rows and by columns", "NF4 or int8 grid", "10 % headroom", "Huffman", "--place cuda",
        "--recording-gpu-ram", "--prune 0.8", "--sparse-update", "--flash-life 3y", "profile --ops", "Gradient checkpointing",
    ),
    "docs/how-to/fine-tune.md": (
        "--accumulate", "16 MiB", "--base nf4", "--explain", "--dpo", "--orpo", "--dora", "--borders", "export --gguf", "convert_hf_to_gguf", "--settings",
    ),
    "docs/how-to/run-the-service.md": ("why --since yesterday", "doctor", "within 100 ms", "plans again\nwhile it trains"),
    "docs/how-to/several-devices.md": ("recall job", "--solve-on any", "--require-secure", "1.8 MB", "introducer", "--min-share"),
    "docs/boards.md": ("--choose-rate", "--per-joule", "--dynamic-update 0.25", "--shard 2/3", "--page psram", "--q88", "mcu library"),
    "docs/concepts/federation.md": ("127 MB", "Balle and Wang", "SecAgg+", "7 of 10", "9478", "Syncthing", "--force"),
    "docs/reference/support.md": ("Rprop", "LBFGS", "370 in\n2.15", "16k kernel", "systemd 252", "sensors, throttling", "simulated_device"),
    "docs/changes/0.2.0.md": (
        "675 MiB", "29.6 MB instead of 33.4", "42.7", "265 to between 93 and 107", "543 before", "2.2 GB", "0.24 of the bytes", "5 MiB an update instead of 260",
        "+0.1 +- 0.5", "21 % and 32 %", "960 MiB at a budget of 600", "1.9 % energy overhead, 3.4 %", "52 s (63 before)", "1.08x", "71 were equal", "56 % less",
    ),
    "benchmarks/README.md": ("1,187 MiB", "592 MiB", "3.75x", "ResNet-18, 32 | 546", "BERT-base, 8 x 128 | 2,452"),
}  # fmt: skip
"""Pages, and what they have of a README that was twice as long, and of the notes of 0.2.0."""


def test_readme_is_read_in_minutes() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_README_LINES
    assert not [line for line in lines if len(line) > MAX_LINE and not line.startswith("|")]


@pytest.mark.parametrize("page", MOVED)
def test_what_left_readme_is_there(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not [what for what in MOVED[page] if what not in text]


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        target
        for target, file, heading in linked(page)
        if not file.exists() or (heading and heading not in headings(file))
    ]
    assert not broken, f"{page.relative_to(ROOT)} links to {broken}"


def test_a_version_of_the_changelog_is_read_in_minutes() -> None:
    """A line for each thing that a user notices; the figures behind it are in docs/changes."""
    text = (ROOT / "CHANGELOG.md").read_text()
    parts = re.split(r"^## ", text, flags=re.M)[1:]
    assert len(parts) > 1 and all(len(part.splitlines()) < 140 for part in parts)
    for part in parts:
        kinds = re.findall(r"^### (.+)$", part, re.M)
        assert kinds == [kind for kind in CHANGES if kind in kinds], part.splitlines()[0]
    entries = [" ".join(entry.split()) for entry in re.findall(r"^- (.+(?:\n  .+)*)", text, re.M)]
    assert len(entries) > 100
    assert not [entry for entry in entries if len(entry) > MAX_ENTRY]


def test_each_option_of_the_changes_exists() -> None:
    """Each is an option of a command or of a benchmark today, so that none that a version brought gets lost."""
    helps = command_helps(build_parser())
    arguments = (argument.typed for one in helps for group in one.groups for argument in group.arguments)
    known = {"--help-all", "--version", *re.findall(r"--[a-z][a-z0-9-]+", " ".join(arguments))}
    programs = "".join(path.read_text() for room in ("benchmarks", "deploy") for path in (ROOT / room).rglob("*.py"))
    for page in (ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "changes").glob("*.md"))):
        named = set(re.findall(r"`[^`]*?(--[a-z][a-z0-9-]+)", page.read_text()))
        assert not [option for option in named - known if f'"{option}"' not in programs], page.name
