"""Which shipped board file describes this machine, for its estimated power."""

import os
import platform
from dataclasses import replace
from pathlib import Path

from port_agent.energy.sources.estimated import PowerModel, generic_model

_MODELS = (
    ("Raspberry Pi 4", "pi4b"),
    ("Raspberry Pi Compute Module 4", "pi4b"),
    ("Raspberry Pi 400", "pi4b"),
    ("Raspberry Pi 5", "pi5"),
    ("Raspberry Pi Compute Module 5", "pi5"),
    ("NVIDIA Jetson Orin Nano", "jetson-orin"),
    ("NVIDIA Orin Nano", "jetson-orin"),
    ("NVIDIA Jetson AGX Orin", "jetson-agx-orin"),
    ("Jetson AGX Orin", "jetson-agx-orin"),  # L4T R35
    ("NVIDIA Jetson TX2", "jetson-tx2"),
    ("quill", "jetson-tx2"),
)
"""Prefix of the device tree's `model` on each board."""
_NAMES = ("proc/device-tree/model", "sys/class/dmi/id/product_name")


def detect_board(root: Path) -> str | None:
    """Return the name of the board file for this machine; None if none describes it."""
    machine = machine_name(root)
    if not machine and (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return "apple-m1"
    return next((board for start, board in _MODELS if machine.startswith(start)), None)


def machine_name(root: Path) -> str:
    """Return the firmware's name of this machine; empty if it has none."""
    for place in _NAMES:
        try:
            name = (root / place).read_text(encoding="ascii", errors="replace").strip("\0\n ")
        except OSError:
            continue
        if name:
            return name
    return ""


def board_model(name: str) -> PowerModel:
    """Return the power model in a board file, by its name or path; raise `BoardError` if there is none."""
    from port_planner.ir.boards import load_board  # loads graphs and costs: only if a board file is used

    board = load_board(name)
    static = board["static_watts"]
    return PowerModel(
        board.title,
        static,
        static + board["compute_watts"],
        board["read_joules_per_byte"],
        board["write_joules_per_byte"],
        f"board file {board.name}, static watts {board.numbers['static_watts'].kind}",
        board["one_core_watts"] if "one_core_watts" in board.numbers else None,
        board["moving_watts"] / board["compute_watts"] if "moving_watts" in board.numbers else 1.0,
    )


def model_of(board: str = "", root: Path = Path("/")) -> PowerModel:
    """Return the power model of this machine: from the named board file, otherwise from the one that
    describes it, or a marked guess.

    Raises BoardError for a board file that cannot be read.
    """
    name = board or detect_board(root)
    return board_model(name) if name else generic_model(os.cpu_count() or 1, machine_name(root))


def power_with(
    threads: int,
    static_watts: float | None = None,
    full_watts: float | None = None,
    *,
    board: str = "",
    root: Path = Path("/"),
) -> PowerModel:
    """Return the power that this machine draws while `threads` of its cores compute; `full_watts` is
    then for these cores alone.

    The watts are the given ones (all cores busy), or else those of `model_of`. Cores draw equal shares. If the board
    file gives the power of the first core, which wakes up more than itself, the others share the rest.
    """
    model, cores = model_of(board, root), os.cpu_count() or 1
    static = model.static_watts if static_watts is None else static_watts
    full = max(static, model.full_watts if full_watts is None else full_watts)
    busy = min(threads, cores)
    first = model.one_core_watts if full_watts is None and static_watts is None else None
    if first is None or cores == 1:
        compute = (full - static) * busy / cores
    else:
        compute = first + max(0.0, full - static - first) * (busy - 1) / (cores - 1)
    return replace(model, static_watts=static, full_watts=static + compute)
