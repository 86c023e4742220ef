"""The packages under test, built by the project's own command from copies of the checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]

DIES_AT_START = '''
_working_main = main


def main(argv: Sequence[str] | None = None) -> int:
    """Stand for a release whose daemon dies at once while the rest of it works."""
    if "run" in sys.argv[1:2]:
        sys.exit("this version cannot start")
    return _working_main(argv)
'''


def checkout_version() -> str:
    """Return the version in pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"$', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def copy_checkout(to: Path) -> None:
    """Copy what packages are built from, once, so that all of one session are of the same state."""
    for name in ("agent", "planner", "firmware", "deploy", "systemd"):
        shutil.copytree(CHECKOUT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, to)


def build(into: Path, scratch: Path, suffix: str = "", *, dies_at_start: bool = False, broken: bool = False) -> Path:
    """Return the .deb of the checkout under a version with `suffix`; optionally one that must be rolled back."""
    original = scratch / "original"
    if not original.exists():
        copy_checkout(original)
    source = scratch / f"source{suffix}{dies_at_start}{broken}"
    shutil.copytree(original, source)
    version = checkout_version()
    replace_once(source / "pyproject.toml", f'version = "{version}"', f'version = "{version}{suffix}"')
    unit = source / "systemd/port-agent.service"
    if suffix:
        replace_once(unit, "Description=PORT agent", f"Description=PORT agent {suffix}")
        with (source / "deploy/config.toml").open("a") as config:
            config.write(f"# as shipped with {suffix}\n")  # an upgrade must not trip over a file that the user changed
    front = source / "agent/cli/__init__.py"
    if dies_at_start:
        front.write_text(front.read_text() + DIES_AT_START)
    if broken:
        front.write_text("import a_module_that_is_not_there\n" + front.read_text())
    command = ["deploy/build-deb.sh", "--output", str(into)]
    ran = subprocess.run(
        command, cwd=source, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return Path(ran.stdout.splitlines()[-1])


def replace_once(file: Path, old: str, new: str) -> None:
    """Replace a text that occurs exactly once."""
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new))
