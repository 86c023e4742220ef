"""Where the agent keeps its things: the system's places for root, those of the user's session for anyone else."""

import errno
import os
import socket
from pathlib import Path

import pytest

from port_agent.control import places
from port_agent.control.client import ControlError
from port_agent.control.http import SOCKET_NAME


def become(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)


def test_root_keeps_to_the_systems_places(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 0)
    assert places.own_state_dir() == Path("/var/lib/port-agent")
    assert places.own_runtime_dir() == Path("/run/port-agent")


def test_a_user_keeps_to_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    become(monkeypatch, 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert places.own_state_dir() == tmp_path / ".local/state/port-agent"
    assert places.own_runtime_dir() == tmp_path / ".local/state/port-agent/run"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert places.own_state_dir() == tmp_path / "state/port-agent"
    assert places.own_runtime_dir() == tmp_path / "run/port-agent"


def test_the_systems_agent_is_asked_before_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    become(monkeypatch, 1000)
    system, user = tmp_path / "system", tmp_path / "port-agent"
    monkeypatch.setattr(places, "SYSTEM_RUNTIME_DIR", system)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert places.connect(None).path.parent == system  # none runs: the error names the system's
    for folder in (user, system):
        folder.mkdir()
        (folder / SOCKET_NAME).touch()
        assert places.connect(None).path.parent == folder
    assert places.connect(tmp_path / "given").path.parent == tmp_path / "given"


def test_who_may_not_look_into_the_systems_folder_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    become(monkeypatch, 1000)
    monkeypatch.setattr(places, "SYSTEM_RUNTIME_DIR", tmp_path / "system")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", refuse)
    client = places.connect(None)
    assert client.path.parent == tmp_path / "system"
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(ControlError, match="usermod -aG port-agent"):
        client.get("/v1/status")


def test_cores_are_those_that_jobs_are_granted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places, "SYSTEM_CONFIG", tmp_path / "config.toml")
    assert places.granted_cores(None, 6) == 6
    (tmp_path / "config.toml").write_text("[limits.not_in_use]\ncpu = 50\n")
    assert places.granted_cores(None, 6) == 3
    (tmp_path / "small.toml").write_text("[limits.not_in_use]\ncpu = 10\n")
    assert places.granted_cores(tmp_path / "small.toml", 6) == 1
