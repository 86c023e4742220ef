"""Images, and the choice of a way to flash; the tools themselves are replaced by recorders of their command lines."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agent.mcu.board.catalogue import BOARDS, FlashMethod, find_board
from agent.mcu.board.firmware import Firmware, build_firmware
from agent.mcu.board.flash import advice, flash
from agent.mcu.board.images import write_hex, write_uf2
from agent.mcu.errors import FirmwareWriteError
from tests.agent.mcu.simulated_board import require_board_tools


def firmware_of(name: str, folder: Path) -> Firmware:
    elf = folder / f"{name}.elf"
    for suffix in (".hex", ".uf2", ".bin"):
        (folder / f"{name}{suffix}").write_bytes(suffix.encode())
    return Firmware(find_board(name), elf, elf.with_suffix(".hex"), folder, 100, 100)


class Tools:
    """Pretends that some tools are installed, and records what they are asked."""

    def __init__(self, *installed: str, code: int = 0) -> None:
        self.installed, self.code = installed, code
        self.ran: list[Sequence[str]] = []

    def which(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name in self.installed else None

    def run(self, command: Sequence[str]) -> int:
        self.ran.append(command)
        return self.code


def test_intel_hex(tmp_path: Path) -> None:
    write_hex(tmp_path / "a.hex", 0x1FFF8, bytes(range(18)))
    lines = (tmp_path / "a.hex").read_text().splitlines()
    assert lines[0] == ":020000040001F9"
    assert lines[1] == ":10FFF800000102030405060708090A0B0C0D0E0F81"
    assert lines[2:] == [":020000040002F8", ":020008001011D5", ":00000001FF"]
    for line in lines:
        assert sum(bytes.fromhex(line[1:])) & 0xFF == 0


def test_uf2(tmp_path: Path) -> None:
    write_uf2(tmp_path / "a.uf2", 0x26000, bytes(300), 0xADA52840)
    data = (tmp_path / "a.uf2").read_bytes()
    assert len(data) == 1024
    for number in range(2):
        first, second, flags, address, size, index, count, family = struct.unpack_from("<8I", data, 512 * number)
        assert (first, second, flags) == (0x0A324655, 0x9E5D5157, 0x2000)
        assert (address, size, index, count, family) == (0x26000 + 256 * number, 256, number, 2, 0xADA52840)
        assert struct.unpack_from("<I", data, 512 * number + 508) == (0x0AB16F30,)


def test_copy_to_the_boot_loaders_drive(tmp_path: Path) -> None:
    drive = tmp_path / "FTHR840BOOT"
    drive.mkdir()
    (drive / "INFO_UF2.TXT").write_text("UF2 Bootloader")
    firmware = firmware_of("feather-nrf52840", tmp_path)
    report = flash(firmware.board, firmware, drives=lambda: [tmp_path, drive], which=Tools().which)
    assert report.method is FlashMethod.UF2
    assert (drive / "feather-nrf52840.uf2").read_bytes() == b".uf2"


def test_serial_tools_get_their_exact_commands(tmp_path: Path) -> None:
    firmware, tools = firmware_of("feather-nrf52840", tmp_path), Tools("adafruit-nrfutil")
    report = flash(firmware.board, firmware, "/dev/ttyACM0", run=tools.run, drives=list, which=tools.which)
    assert report.method is FlashMethod.NRFUTIL and len(tools.ran) == 2
    assert tools.ran[0][:3] == ("adafruit-nrfutil", "dfu", "genpkg")
    assert tools.ran[1][1:7] == (
        "dfu",
        "serial",
        "--package",
        str(tmp_path / "feather-nrf52840.zip"),
        "-p",
        "/dev/ttyACM0",
    )
    firmware, tools = firmware_of("feather-m0", tmp_path), Tools("bossac")
    flash(firmware.board, firmware, "/dev/ttyACM0", run=tools.run, drives=list, which=tools.which)
    assert "--port=ttyACM0" in tools.ran[0] and "--offset=0x2000" in tools.ran[0]
    firmware, tools = firmware_of("stm32f405", tmp_path), Tools("stm32loader")
    flash(firmware.board, firmware, "/dev/ttyUSB0", run=tools.run, drives=list, which=tools.which)
    assert tools.ran[0][:3] == ("stm32loader", "-p", "/dev/ttyUSB0") and "0x8000000" in tools.ran[0]
    firmware, tools = firmware_of("nrf52840-dk", tmp_path), Tools("pyocd")
    flash(firmware.board, firmware, run=tools.run, drives=list, which=tools.which)
    assert tools.ran[0][:4] == ("pyocd", "flash", "-t", "nrf52840")


def test_without_any_tool_the_command_is_printed(tmp_path: Path) -> None:
    firmware = firmware_of("microbit", tmp_path)
    with pytest.raises(FirmwareWriteError, match="pyocd flash -t nrf51822") as caught:
        flash(firmware.board, firmware, drives=list, which=Tools().which)
    assert f"cp {tmp_path / 'microbit.hex'} DRIVE/" in str(caught.value)


def test_failing_tool_is_an_error(tmp_path: Path) -> None:
    firmware, tools = firmware_of("nrf52840-dk", tmp_path), Tools("pyocd", code=3)
    with pytest.raises(FirmwareWriteError, match="code 3"):
        flash(firmware.board, firmware, run=tools.run, drives=list, which=tools.which)


def test_simulated_boards_are_not_flashed(tmp_path: Path) -> None:
    firmware = firmware_of("qemu-m4f", tmp_path)
    with pytest.raises(FirmwareWriteError, match="mcu simulate"):
        flash(firmware.board, firmware)


FAST = {"qemu-m4f", "qemu-m0", "arduino-zero", "feather-nrf52840", "stm32f405"}
"""One board per port; the others differ in numbers only."""


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
    from agent.mcu.errors import BuildError

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt install gcc-arm-none-eabi"):
        build_firmware(board, model, tmp_path)
