"""Images, and the choice of a way to flash; the tools themselves are replaced by recorders of their command lines."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from port_agent.mcu.board.board_errors import FirmwareWriteError
from port_agent.mcu.board.catalogue import FlashMethod, find_board
from port_agent.mcu.board.firmware import Firmware
from port_agent.mcu.board.flash import flash


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


def test_a_pico_is_flashed_by_the_drive_of_its_rom(tmp_path: Path) -> None:
    drive, firmware = tmp_path / "RPI-RP2", firmware_of("pico", tmp_path)
    with pytest.raises(FirmwareWriteError, match=r"hold BOOTSEL .*\n?.*pico\.uf2"):
        flash(firmware.board, firmware, drives=list, which=Tools().which)
    drive.mkdir()
    (drive / "INFO_UF2.TXT").write_text("UF2 Bootloader v3.0")
    report = flash(firmware.board, firmware, drives=lambda: [drive], which=Tools().which)
    assert report.method is FlashMethod.BOOTSEL and report.copied_to == drive / "pico.uf2"


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
