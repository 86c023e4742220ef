"""Where the agent keeps its files on this machine, and how to find the running one."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.control import PATIENCE_S

if TYPE_CHECKING:
    from port_agent.control.client import ControlClient
    from port_agent.energy.sources.registry import EnergyConfig
    from port_agent.policy.config import Config

SYSTEM_RUNTIME_DIR = Path("/run/port-agent")
SYSTEM_STATE_DIR = Path("/var/lib/port-agent")
SYSTEM_CONFIG = Path("/etc/port-agent/config.toml")


def own_state_dir() -> Path:
    """Return the directory in which an agent that this user starts keeps jobs and checkpoints."""
    if os.geteuid() == 0:
        return SYSTEM_STATE_DIR
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "port-agent"


def own_runtime_dir() -> Path:
    """Return the directory in which an agent that this user starts keeps its control socket."""
    if os.geteuid() == 0:
        return SYSTEM_RUNTIME_DIR
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "port-agent" if base else own_state_dir() / "run"


def connect(runtime_dir: Path | None, patience_s: float = PATIENCE_S) -> "ControlClient":
    """Return a client of the agent in `runtime_dir`; None means the system's agent, or else this user's."""
    from port_agent.control.client import ControlClient
    from port_agent.control.http import SOCKET_NAME

    if runtime_dir is None:
        places = [SYSTEM_RUNTIME_DIR, own_runtime_dir()]
        runtime_dir = next((place for place in places if _is_there(place / SOCKET_NAME)), places[0])
    return ControlClient(runtime_dir, patience_s)


def _is_there(socket: Path) -> bool:
    """Return whether a socket is visible.

    Users without access to the system's directory get an error that says so when they connect.
    """
    try:
        return socket.exists()
    except PermissionError:
        return False


def energy_settings(config: Path | None) -> "tuple[EnergyConfig, int]":
    """Return the `[energy]` settings and the daily budget of flash writes from this file, or else from the
    system's file if it exists.

    Raises ConfigError and EnergyConfigError.
    """
    from port_agent.energy.sources.registry import EnergyConfig

    found = _settings(config)
    return EnergyConfig.from_table(found.energy), found.policy.flash_write_budget_bytes_per_day


def granted_cores(config: Path | None, cores: int) -> int:
    """Return how many of `cores` cores jobs may use while nobody uses the device, by the same file: at least one.

    Raises ConfigError.
    """
    return max(1, int(cores * _settings(config).policy.not_in_use.cpu_percent / 100))


def _settings(config: Path | None) -> "Config":
    from port_agent.policy.config import Config, load_config

    path = config or SYSTEM_CONFIG
    return load_config(path) if path.is_file() else Config()
