"""Machines as trees of files and programs that print what real ones print."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.facts import SensorOptions
from port_agent.facts.linux import LinuxPlatform
from tests.agent.trees import MAINS, supply_tree, write_tree

OPTIONS = SensorOptions(state_dir=Path("/"))


def stat(user: int, idle: int, nice: int = 0) -> str:
    return f"cpu  {user} {nice} 0 {idle} 0 0 0 0 0 0\ncpu0 {user} {nice} 0 {idle} 0 0 0 0 0 0\n"


def linux(tmp_path: Path) -> LinuxPlatform:
    proc = {"stat": stat(100, 900), "meminfo": "MemTotal: 948012 kB\nMemAvailable: 512000 kB\n"}
    proc |= {"pressure/memory": "some avg10=3.00 avg60=0 avg300=0 total=1\n"}
    write_tree(tmp_path / "proc", proc)
    supply_tree(tmp_path / "sys", ACAD=MAINS.format(online=1))
    zone = "class/thermal/thermal_zone0"
    write_tree(tmp_path / "sys", {f"{zone}/type": "cpu", f"{zone}/temp": "45000"})
    (tmp_path / "dev/pts").mkdir(parents=True, exist_ok=True)
    write_tree(tmp_path / "sys/class/net", {"lo/operstate": "unknown", "eth0/operstate": "up"})
    return LinuxPlatform(tmp_path / "sys", tmp_path / "proc", tmp_path / "dev")


def fake_program(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def on_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def hang(path: Path) -> Callable[[], None]:
    """Put a FIFO that nobody writes in place of a file; what is returned lets those go who read it."""
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)

    def let_go() -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    return let_go
