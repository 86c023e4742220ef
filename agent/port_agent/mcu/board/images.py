"""Write the image formats that boot loaders accept: Intel HEX and UF2."""

import struct
from pathlib import Path

HEX_BYTES_PER_LINE = 16
UF2_PAYLOAD = 256
UF2_BLOCK = struct.Struct("<8I476sI")
UF2_MAGIC = (0x0A324655, 0x9E5D5157, 0x0AB16F30)
UF2_FAMILY_PRESENT = 0x2000


def _hex_line(address: int, kind: int, data: bytes) -> str:
    record = struct.pack(">BHB", len(data), address & 0xFFFF, kind) + data
    return f":{record.hex().upper()}{-sum(record) & 0xFF:02X}\n"


def write_hex(path: Path, origin: int, data: bytes) -> None:
    """Write `data` as Intel HEX with extended linear addresses."""
    lines: list[str] = []
    upper = None
    for at in range(0, len(data), HEX_BYTES_PER_LINE):
        address = origin + at
        if address >> 16 != upper:
            upper = address >> 16
            lines.append(_hex_line(0, 4, upper.to_bytes(2, "big")))
        lines.append(_hex_line(address, 0, data[at : at + HEX_BYTES_PER_LINE]))
    lines.append(_hex_line(0, 1, b""))
    path.write_text("".join(lines))


def write_uf2(path: Path, origin: int, data: bytes, family: int) -> None:
    """Write `data` as UF2 blocks of 256 bytes (format: github.com/microsoft/uf2)."""
    count = -(-len(data) // UF2_PAYLOAD)
    blocks = []
    for number in range(count):
        chunk = data[number * UF2_PAYLOAD : (number + 1) * UF2_PAYLOAD].ljust(UF2_PAYLOAD, b"\xff")
        blocks.append(
            UF2_BLOCK.pack(
                UF2_MAGIC[0],
                UF2_MAGIC[1],
                UF2_FAMILY_PRESENT,
                origin + number * UF2_PAYLOAD,
                UF2_PAYLOAD,
                number,
                count,
                family,
                chunk,
                UF2_MAGIC[2],
            )
        )
    path.write_bytes(b"".join(blocks))
