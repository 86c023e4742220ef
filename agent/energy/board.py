"""Which shipped board file describes this machine, for its estimated power."""

import platform
from pathlib import Path

from agent.energy.estimated import PowerModel

_MODELS = (
    ("Raspberry Pi 4", "pi4b"),
    ("Raspberry Pi Compute Module 4", "pi4b"),
    ("Raspberry Pi 400", "pi4b"),
    ("Raspberry Pi 5", "pi5"),
    ("Raspberry Pi Compute Module 5", "pi5"),
    ("NVIDIA Jetson Orin Nano", "jetson-orin"),
    ("NVIDIA Orin Nano", "jetson-orin"),
    ("NVIDIA Jetson TX2", "jetson-tx2"),
    ("quill", "jetson-tx2"),
)
"""How the device tree's `model` begins on each board. An AGX Orin is none of these: its file would be another."""


def detect_board(root: Path) -> str | None:
    """Return the name of the board file for this machine, None if none describes it."""
    path = root / "proc/device-tree/model"
    if path.exists():
        model = path.read_text(encoding="ascii", errors="replace")
        return next((board for start, board in _MODELS if model.startswith(start)), None)
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    return "apple-m1" if apple else None


def board_model(name: str) -> PowerModel:
    """Return the power model in a board file, by its name or path; raise `BoardError` if there is none."""
    from planner.devices import load_board  # graphs and costs come with it: only where a board file is used

    board = load_board(name)
    static = board["static_watts"]
    return PowerModel(
        board.title,
        static,
        static + board["compute_watts"],
        board["read_joules_per_byte"],
        board["write_joules_per_byte"],
        f"board file {board.name}, static watts {board.numbers['static_watts'].kind}",
    )


def detect_model(root: Path) -> PowerModel | None:
    """Return the power model of this machine; None if no board file describes it."""
    name = detect_board(root)
    return board_model(name) if name else None
