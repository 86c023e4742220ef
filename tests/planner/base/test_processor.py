"""Cores by their names, and processors told apart, from what Linux says of them."""

import pytest

from port_planner.base.processor import core_names, cpuinfo, identity

X86 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2\n"
CORE = "processor\t: {number}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU implementer\t: {maker}\nCPU part\t: {part}\n\n"
PI_5 = "".join(CORE.format(number=n, features="fp asimd", maker="0x41", part="0xd0b") for n in range(4))
PI_5 += "Revision\t: c04170\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (X86, ("AMD EPYC",)),
        (PI_5, ("Cortex-A76",)),
        (
            CORE.format(number=0, features="fp", maker="0x41", part="0xd05")
            + CORE.format(number=1, features="fp", maker="0x41", part="0xd0b"),
            ("Cortex-A55", "Cortex-A76"),
        ),
        (CORE.format(number=0, features="fp", maker="0x41", part="0xfff"), ("Arm core 0xfff",)),
        (CORE.format(number=0, features="fp", maker="0x4e", part="0x004"), ("core 0x004 of implementer 0x4e",)),
        ("", ()),
    ],
)
def test_cores_have_their_names(text: str, names: tuple[str, ...]) -> None:
    assert core_names(text) == names


def test_what_chooses_kernels_tells_processors_apart() -> None:
    """A part number is its implementer's own, and a core that multiplies bfloat16 has other
    kernels than one that does not.
    """
    core = {"number": 0, "features": "fp asimd", "maker": "0x41", "part": "0xd0b"}
    others = [{**core, **other} for other in ({"features": "fp asimd bf16"}, {"maker": "0x4e"}, {"part": "0xd08"})]
    found = {identity(CORE.format(**described)) for described in (core, *others)}
    assert len(found) == 4
    assert identity(CORE.format(**core) * 4) == identity(CORE.format(**core))
    assert identity(cpuinfo()) == identity(cpuinfo())
