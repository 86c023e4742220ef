"""Costs and plans that this device shares with paired ones: files by name, a limited number of each.

Planning on this device stores them here (`port-agent plan`), and nothing else is ever read for another device. This
module does not interpret their content; the receiver checks it.
"""

import contextlib
from pathlib import Path

from port_agent.peers.connection.messages import ANSWER_LIMIT_BYTES
from port_agent.peers.exchange.answers import Topic
from port_agent.system.atomic_file import write_atomically
from port_agent.system.checksum import bytes_checksum
from port_planner.base.errors import ExitCode, PortError

SHARED_FOLDER = "shared"
MAX_SHARED = 64
"""Largest number of files of one topic; the oldest are removed. A plan takes some kB, and costs take some 100 kB."""


class SharedFileError(PortError):
    """A content that cannot be shared."""

    exit_code = ExitCode.IMPOSSIBLE


class SharedFiles:
    """The files of a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / SHARED_FOLDER

    def read(self, topic: Topic, name: str) -> bytes | None:
        """Return a shared content; None if there is none, or it is damaged."""
        with contextlib.suppress(OSError):
            with (self._folder / topic / name).open("rb") as file:
                seal, _, content = file.read(ANSWER_LIMIT_BYTES + len(bytes_checksum(b"")) + 1).partition(b"\n")
            if seal == bytes_checksum(content).encode():
                return content
        return None

    def keep(self, topic: Topic, name: str, content: bytes) -> None:
        """Share content from now on, durably; raises SharedFileError if it is too long, OSError."""
        if not 0 < len(content) <= ANSWER_LIMIT_BYTES:
            raise SharedFileError(f"{topic} of {len(content)} bytes; between 1 and {ANSWER_LIMIT_BYTES} are shared")
        folder = self._folder / topic
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / name, bytes_checksum(content).encode() + b"\n" + content)
        kept = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MAX_SHARED]:
            old.unlink()
