"""The firmware on a Raspberry Pi Pico: what its boot ROM checks, and, where rp2040js is installed, the whole board."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.mcu_networks.target import missing_rp2040js
from port_agent.mcu.board.firmware import build_firmware
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.effects import TrainingOptions, TrainingState
from port_agent.mcu.protocol.queries import ResetReason
from port_agent.mcu.protocol.session import Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport
from port_planner.mcu import CompiledModel, HostEngine, UpdateOptions, compile_model
from port_planner.mcu.zoo import DigitsNet
from tests.agent.mcu.simulated_board import require_board_tools
from tests.agent.mcu.small_model import write_model
from tests.firmware.ports.emulated_pico import EmulatedPico

pytestmark = pytest.mark.process

SECOND_STAGE_BYTES = 252
FLASH_ID = bytes.fromhex("e6605838834f2c31")
"""Of the emulator's flash chip, firmware/bench/pico.cjs."""
PATIENT = Patience(first_s=2.0, longest_s=10.0, give_up_s=120.0)


def crc32_mpeg2(data: bytes) -> int:
    """Return the checksum as the boot ROM has it (RP2040 Datasheet, 2.8.1.3.1)."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C1_1DB7 if crc & 0x8000_0000 else 0)) & 0xFFFF_FFFF
    return crc


@pytest.mark.slow
def test_the_boot_rom_takes_the_image(tmp_path: Path) -> None:
    require_board_tools()
    firmware = build_firmware("pico", write_model(tmp_path / "model"), tmp_path)
    image = firmware.elf.with_suffix(".bin").read_bytes()
    stage, checksum = image[:SECOND_STAGE_BYTES], image[SECOND_STAGE_BYTES : SECOND_STAGE_BYTES + 4]
    assert int.from_bytes(checksum, "little") == crc32_mpeg2(stage)
    stack, start = (int.from_bytes(image[at : at + 4], "little") for at in (256, 260))
    assert (stack, start & 1) == (0x2004_0000, 1)
    assert 256 < (start & ~1) - firmware.board.flash_origin < len(image)


@pytest.fixture(scope="module")
def digits() -> tuple[CompiledModel, np.ndarray]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    data = np.random.default_rng(0).random((6, 1, 8, 8), np.float32)
    model = compile_model(DigitsNet().eval(), data, simd=False)
    return model, model.quantize_input(data)


def connect(pico: EmulatedPico) -> Device:
    return Device(Session(SerialTransport(str(pico.port)), PATIENT))


@pytest.mark.slow
@pytest.mark.skipif(missing_rp2040js() is not None, reason=str(missing_rp2040js()))
@pytest.mark.parametrize("connection", ["uart", "usb"])
def test_a_pico_trains_digits_to_the_hosts_bits_and_keeps_them_without_power(
    connection: str, digits: tuple[CompiledModel, np.ndarray], tmp_path: Path
) -> None:
    """Over its serial port: trained, saved, power cut, booted, trained again."""
    require_board_tools()
    model, rows = digits
    host = HostEngine(model)
    host.set_options(UpdateOptions(0.03))
    model.write(tmp_path / "model")
    with EmulatedPico(build_firmware("pico", tmp_path / "model", tmp_path), tmp_path / "pico", connection) as pico:
        device = connect(pico)
        assert device.info.serial == FLASH_ID
        device.set_training(TrainingOptions(0.03), TrainingState(1, 0))
        for label in range(4):
            device.train((label,), rows[label].tobytes())
        host.train_many(rows[:4], np.arange(4))
        assert device.read_parameters() == host.parameters
        device.save()
        device.train((9,), rows[5].tobytes())  # never saved
        device.session.close()
        pico.kill()
        pico.start()
        device = connect(pico)
        assert device.status().reset_reason is ResetReason.POWER
        assert device.read_parameters() == host.parameters
        for label in range(4, 6):
            device.train((label,), rows[label].tobytes())
        host.train_many(rows[4:], np.arange(4, 6))
        device.save()  # into the other slot
        device.session.reset()
        assert device.status().reset_reason is ResetReason.REQUEST
        assert device.read_parameters() == host.parameters
        assert device.status().overruns == 0
        device.session.close()
