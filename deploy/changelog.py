#!/usr/bin/env python3
"""Read and cut CHANGELOG.md (Keep a Changelog).

python deploy/changelog.py section 0.2.0    print what a version brought, for its release
python deploy/changelog.py cut 0.3.0        turn Unreleased into that version, with today's date
"""

import argparse
import re
import sys
from datetime import date
from pathlib import Path

CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"
UNRELEASED = "## [Unreleased]\n"


class ChangelogError(ValueError):
    """A version that is not there, or one that cannot be cut."""


def main() -> int:
    """Run the command; the exit code is 2 where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("section", "cut"))
    parser.add_argument("version")
    arguments = parser.parse_args()
    text = CHANGELOG.read_text()
    try:
        if arguments.verb == "section":
            print(section(text, arguments.version))
        else:
            CHANGELOG.write_text(cut(text, arguments.version, date.today()))
    except ChangelogError as error:
        print(f"changelog: {error}", file=sys.stderr)
        return 2
    return 0


def section(text: str, version: str) -> str:
    """Return the text of a version. Raises ChangelogError where it is not there."""
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", text, re.M | re.S)
    if found is None:
        raise ChangelogError(f"there is no version {version}; cut it first")
    return found[1].strip()


def cut(text: str, version: str, day: date) -> str:
    """Return the changelog with Unreleased as a version of this day, and an empty Unreleased above it.

    Raises ChangelogError for a version that is not X.Y.Z or is there already, and where nothing is unreleased.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ChangelogError(f"{version} is not a valid version; write it like 0.3.0")
    if f"## [{version}]" in text:
        raise ChangelogError(f"version {version} is there already")
    if not section(text, "Unreleased"):
        raise ChangelogError("nothing is unreleased")
    return text.replace(UNRELEASED, f"{UNRELEASED}\n## [{version}] - {day.isoformat()}\n", 1)


if __name__ == "__main__":
    sys.exit(main())
