"""The packages under test: one built by the project's own command, and later versions of it."""

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
    """Return the version in the checkout's source."""
    found = re.search(
        r'^VERSION = "([^"]+)"$', (CHECKOUT / "agent/port_agent/system/__init__.py").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1]


def build(into: Path) -> Path:
    """Return the .deb of the checkout, built by the project's own command."""
    source = into / "source"
    for name in ("agent", "planner", "firmware", "deploy", "systemd"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, source)
    command = ["deploy/build-deb.sh", "--output", str(into)]
    ran = subprocess.run(
        command, cwd=source, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    shutil.rmtree(source)
    return Path(ran.stdout.splitlines()[-1])


def variant(original: Path, scratch: Path, suffix: str, *, dies_at_start: bool = False, broken: bool = False) -> Path:
    """Return the same package under a later version; optionally one that must be rolled back.

    Its unit and its configuration file differ too, as those of a real release may.
    """
    root = scratch / f"root{suffix}"
    subprocess.run(["dpkg-deb", "-R", str(original), str(root)], check=True)
    version = checkout_version()
    application = root / "usr/lib/port-agent/app"
    replace_once(root / "DEBIAN/control", f"\nVersion: {version}\n", f"\nVersion: {version}{suffix}\n")
    (metadata,) = application.glob("port_agent-*.dist-info/METADATA")
    replace_once(metadata, f"\nVersion: {version}\n", f"\nVersion: {version}{suffix}\n")
    for unit in (root / "usr/lib/systemd/system/port-agent.service", root / "usr/lib/port-agent/port-agent.service"):
        replace_once(unit, "Description=PORT agent", f"Description=PORT agent {suffix}")
    with (root / "etc/port-agent/config.toml").open("a") as config:
        config.write(f"# as shipped with {suffix}\n")  # an upgrade must not trip over a file that the user changed
    front = application / "port_agent/cli/__init__.py"
    if dies_at_start:
        front.write_text(front.read_text() + DIES_AT_START)
    if broken:
        front.write_text("import a_module_that_is_not_there\n" + front.read_text())
    package = original.with_name(original.name.replace(version, f"{version}{suffix}"))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-b", str(root), str(package)], check=True)
    return package


def replace_once(file: Path, old: str, new: str) -> None:
    """Replace a text that occurs exactly once."""
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {file}"
    file.write_text(text.replace(old, new))
