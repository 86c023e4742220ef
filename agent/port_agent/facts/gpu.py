"""Whether there is a GPU and whether somebody uses it, found from device nodes, a Jetson's load file or
nvidia-smi, without torch.
"""

import re

from port_agent.facts.platform import OwnUse, SensorOptions
from port_agent.facts.readings import Answer, IdleSignal
from port_agent.facts.sysfs import Tree
from port_planner.ir.device_kinds import CUDA

SENSOR = "gpu"
_NODES = ("nvidia0", "nvhost-gpu", "nvmap")
"""Device files below /dev: of a card, and of a Jetson's GPU before and since L4T R36."""
_JETSON_GPU = re.compile(r"\.(gpu|ga10b|gv11b|gp10b|gm20b)$|^gpu\.")
"""Names of a Jetson's GPU below /sys/class/devfreq: Orin, Xavier, TX2, Nano."""
QUERY = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
"""Fields to query from nvidia-smi."""
_CARDS = "bus/pci/drivers/nvidia"
"""Folder below /sys that has a folder for each of the driver's cards, by PCI address."""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def present_kinds(tree: Tree) -> frozenset[str]:
    """Return the kinds of devices that a Linux machine has besides its CPU."""
    there = [tree.stat(tree.dev / node, SENSOR) is not None for node in _NODES]
    return frozenset({CUDA} if any(there) else ())


def jetson_load_percent(tree: Tree) -> float | None:
    """Return how busy a Jetson's GPU is; None if there is none. Its file counts tenths of a percent."""
    for entry in tree.children(tree.sys / "class/devfreq", SENSOR):
        if _JETSON_GPU.search(entry.name):
            load = tree.number(entry / "device/load", SENSOR)
            if load is not None:
                return load / 10
    return None


def awake_cards(tree: Tree) -> tuple[str, ...] | None:
    """Return the PCI addresses of the cards that the kernel has not suspended; None if there is no card.

    A suspended card is unused, and querying it would wake it.
    """
    cards = [entry for entry in tree.children(tree.sys / _CARDS, SENSOR) if _PCI_ADDRESS.fullmatch(entry.name)]
    awake = (c.name for c in cards if tree.text(c / "power/runtime_status", SENSOR) != "suspended")
    return tuple(awake) if cards else None


def parse_utilization(text: str) -> float | None:
    """Return the busiest card's percent from nvidia-smi's output, which has a line per card;
    None if no card reports it.
    """
    shares = [float(word) for word in text.split() if word.replace(".", "", 1).isdigit()]
    return max(shares, default=None)


def gpu_signal(percent: float | None, options: SensorOptions, own: OwnUse) -> tuple[IdleSignal, ...]:
    """Return the signal of the GPU's use: none if it is unknown, and no opinion while our own worker may cause it."""
    if percent is None:
        return ()
    if own.training:
        return (IdleSignal(SENSOR, Answer.UNKNOWN, "not judged while the worker runs"),)
    idle = Answer.YES if percent <= options.busy_cpu_percent else Answer.NO
    return (IdleSignal(SENSOR, idle, f"the GPU is {percent:.0f} % busy (limit {options.busy_cpu_percent:.0f} %)"),)
