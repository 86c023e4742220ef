"""The processor of this machine, from the text of Linux's /proc/cpuinfo: its cores by name, and
all that determines kernels.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

ARM = 0x41
ARM_PARTS = {
    0xD03: "Cortex-A53", 0xD04: "Cortex-A35", 0xD05: "Cortex-A55", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72", 0xD09: "Cortex-A73",
    0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1", 0xD0D: "Cortex-A77", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78",
    0xD42: "Cortex-A78AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510", 0xD47: "Cortex-A710", 0xD49: "Neoverse-N2", 0xD4F: "Neoverse-V2",
    0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD83: "Neoverse-V3AE",
}  # fmt: skip
"""Part number in bits 4 to 15 of MIDR_EL1 -> core, of implementer Arm (Arm's technical reference manuals)."""

_KINDS = ("model name", "CPU implementer", "CPU part")
_INSTRUCTIONS = ("flags", "Features")
"""CPU flags that libraries use to choose kernels; on Arm they include bf16, i8mm and sve, which the vector width does
not show.
"""


def cpuinfo() -> str:
    """Return what Linux reports about its processors; empty on other systems."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    return ""


def core_names(text: str) -> tuple[str, ...]:
    """Return the kinds of cores by name, each once, such as Cortex-A76; empty if the text does not name them."""
    names: dict[str, None] = {}
    for core in _processors(text):
        if "model name" in core:
            names[core["model name"]] = None
        elif "CPU part" in core and int(core.get("CPU implementer", "0"), 16) == ARM:
            names[ARM_PARTS.get(int(core["CPU part"], 16), f"Arm core {core['CPU part']}")] = None
        elif "CPU part" in core:
            names[f"core {core['CPU part']} of implementer {core.get('CPU implementer', 'unknown')}"] = None
    return tuple(names)


def identity(text: str) -> tuple[str, ...]:
    """Return what distinguishes processors whose kernels may compute differently: kinds of cores
    and instructions, sorted.
    """
    kinds = {f"{key}: {core[key]}" for core in _processors(text) for key in (*_KINDS, *_INSTRUCTIONS) if key in core}
    return tuple(sorted(kinds))


def _processors(text: str) -> Iterator[dict[str, str]]:
    """Yield the lines of each processor as a mapping."""
    for part in text.split("\n\n"):
        pairs = (line.partition(":") for line in part.splitlines())
        yield {key.strip(): value.strip() for key, colon, value in pairs if colon}
