"""A real headless Chromium, for tests of pages."""

import shutil
import subprocess
from pathlib import Path

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--virtual-time-budget=5000",
)  # fmt: skip


def chromium() -> str:
    """Return the browser's path; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    return found


def dump_dom(url: str, profile: Path, width: int, *more: str) -> str:
    """Return the page's DOM after its scripts ran, in a window of `width` pixels."""
    command = [
        chromium(),
        *_FLAGS,
        f"--user-data-dir={profile}",
        f"--window-size={width},1600",
        *more,
        "--dump-dom",
        url,
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode()


def screenshot(url: str, profile: Path, target: Path, width: int, height: int) -> bytes:
    """Return a PNG of the page, also kept as `target`."""
    size = f"--window-size={width},{height}"
    command = [chromium(), *_FLAGS, f"--user-data-dir={profile}", size, f"--screenshot={target}", url]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    return target.read_bytes()
