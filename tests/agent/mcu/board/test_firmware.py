"""Every port builds within its limits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.mcu.board.catalogue import BOARDS, FlashMethod
from port_agent.mcu.board.firmware import Firmware, build_firmware, kernel_kinds
from port_agent.mcu.board.flash import advice
from tests.agent.mcu.simulated_board import require_board_tools

FAST = {"qemu-m4f", "qemu-m0", "arduino-zero", "feather-nrf52840", "stm32f405"}
"""One board per port; the others differ in numbers only."""


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "board",
    [pytest.param(b, marks=() if b.name in FAST else pytest.mark.long, id=b.name) for b in BOARDS if b.cpu],
)
def test_every_port_builds_within_its_limits(board: object, model: Path, tmp_path: Path) -> None:
    require_board_tools()
    name = getattr(board, "name", "")
    firmware = build_firmware(name, model, tmp_path)
    assert firmware.image is not None and firmware.image.is_file()
    assert firmware.static_ram_bytes is not None and firmware.flash_bytes is not None
    limits = firmware.board
    assert firmware.static_ram_bytes + limits.stack_bytes <= limits.ram_bytes
    assert firmware.flash_bytes <= limits.flash_bytes - limits.flash_reserved_bytes
    if FlashMethod.NONE not in limits.methods:
        assert advice(limits, firmware, None)


@pytest.mark.parametrize("board", ["qemu-m4f", "qemu-m0"])
def test_missing_compiler_says_how_to_get_it(
    board: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Callable[[str], Firmware]
) -> None:
    from port_agent.mcu.board.board_errors import BuildError

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt install gcc-arm-none-eabi"):
        build_firmware(board, model, tmp_path)


def test_a_header_says_which_kernels_a_build_needs(tmp_path: Path) -> None:
    (tmp_path / "model.h").write_text("#define PORT_MODEL_KINDS 0x142u\n")
    assert kernel_kinds(tmp_path) == 0x142
    (tmp_path / "model.h").write_text("")
    assert kernel_kinds(tmp_path) == 0xFFFF_FFFF
