"""Images of firmware: Intel HEX and UF2."""

import struct
from pathlib import Path

from port_agent.mcu.board.images import write_hex, write_uf2


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
