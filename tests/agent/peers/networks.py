"""Two machines on one cable: network namespaces joined by a veth pair. Needs root and iproute2."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from port_agent.control.client import ControlClient
from tests.agent.live_daemon import CONFIG

ROOT = Path(__file__).resolve().parents[3]
_NUMBERS = itertools.count()


def ip(*words: str) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def cable() -> Iterator[tuple[str, str]]:
    """Give the names of two namespaces whose interface is called `wire`: 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"pa{os.getpid()}-{next(_NUMBERS)}"
    names = (f"{mark}a", f"{mark}b")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            peer = ["peer", "name", "wire", "netns", names[1]]
            ip("link", "add", "wire", "netns", names[0], "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def agent_in(namespace: str, root: Path, peers: str) -> Iterator[tuple[ControlClient, "subprocess.Popen[bytes]"]]:
    """Run a daemon in a namespace; its control socket works from everywhere."""
    (root / "sys/class/power_supply").mkdir(parents=True)
    (root / "config.toml").write_text(CONFIG + peers)
    words = [str(root / name) for name in ("state", "run", "config.toml", "sys")]
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tests.agent.live", *words]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield ControlClient(root / "run"), process
        finally:
            process.terminate()
