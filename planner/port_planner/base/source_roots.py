"""The locations of our two packages: side by side in an installation, one folder each in a checkout."""

from pathlib import Path

_PLANNER = Path(__file__).resolve().parents[2]
_AGENT_IN_CHECKOUT = _PLANNER.parent / "agent"
_AGENT = _AGENT_IN_CHECKOUT if (_AGENT_IN_CHECKOUT / "port_agent").is_dir() else _PLANNER

SOURCE_ROOTS = tuple(dict.fromkeys((_AGENT, _PLANNER)))
"""The folders, without duplicates, that must be on the import path to import `port_agent` and `port_planner`."""
PACKAGE_FOLDERS = (_AGENT / "port_agent", _PLANNER / "port_planner")
FIRMWARE_SOURCES = _AGENT / "port_agent" / "firmware"
"""The C sources for microcontrollers: `firmware/` in a checkout, package data of `port_agent` in an installation."""
