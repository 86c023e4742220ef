"""Send what nobody should send: forged, broken and endless announcements to everybody on the wire.

python hostile.py OWN_ADDRESS
"""

import os
import socket
import struct
import sys
import time

GROUP, PORT = "224.0.0.251", 5353
PTR, TXT, SRV, A, IN = 12, 16, 33, 1, 0x8001
TYPE = b"\x0b_port-agent\x04_tcp\x05local\x00"


def record(name: bytes, kind: int, data: bytes, ttl_s: int = 120) -> bytes:
    """Return a resource record."""
    return name + struct.pack(">HHIH", kind, IN if kind != PTR else 1, ttl_s, len(data)) + data


def answer(*records: bytes) -> bytes:
    """Return a response."""
    return struct.pack(">6H", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


def announce(label: bytes, text: bytes) -> bytes:
    """Return an announcement of the service `label`."""
    name = bytes([len(label)]) + label + TYPE
    server = b"\x04evil\x05local\x00"
    parts = (
        record(TYPE, PTR, name),
        record(name, SRV, struct.pack(">3H", 0, 0, 0) + server),
        record(name, TXT, text),
        record(server, A, socket.inet_aton("10.77.0.66")),
    )
    return answer(*parts)


def strings(*values: bytes) -> bytes:
    """Return the data of a TXT record."""
    return b"".join(bytes([len(value)]) + value for value in values)


def packets() -> list[bytes]:
    """Return the attack."""
    good = (b"f=1", b"id=bad0bad0bad0", b"name=\x1b[31mred\x07\xff" + b"A" * 200, b"state=\x00", b"board=[red]x[/]")
    attack = [
        os.urandom(900),
        b"",
        answer()[:7],
        announce(b"\xff\xfe\x00", strings(b"f=1")),
        announce(b"cafecafecafe", b"\xffshort"),
        announce(b"cafecafecafe", strings(*[b"x" * 255] * 5)),
        announce(b"cafecafecafe", strings(b"f=1", b"id=bad0bad0bad0")),
        announce(b"A" * 63, strings(b"f=1", b"id=" + b"A" * 63)),
    ]
    for number in range(300):
        label = b"%012x" % (0xF00000000000 + number)
        attack.append(announce(label, strings(b"f=1", b"id=" + label)))
    return [announce(b"bad0bad0bad0", strings(*good)), *attack]


def main() -> None:
    """Send everything three times, as datagrams get lost; the flood comes last, for it fills the list."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((sys.argv[1], PORT))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(sys.argv[1]))
        first, *attack = packets()
        for _ in range(3):
            sock.sendto(first, (GROUP, PORT))
            time.sleep(0.2)  # it cannot hear whether one arrived
        for packet in attack * 3:
            sock.sendto(packet, (GROUP, PORT))


if __name__ == "__main__":
    main()
