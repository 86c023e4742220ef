"""Errors between the agent and a microcontroller.

Each one gives its numbers and names a remedy.
"""

from port_planner.base.errors import ExitCode, PortError


class McuError(PortError):
    """Root of the errors of this package."""


class FramingError(McuError):
    """Bytes that are not a frame."""


class MessageError(McuError):
    """A frame whose content is not a message of this protocol."""


class DisconnectedError(McuError):
    """The port has disappeared: the board was unplugged, the simulator ended, or the system closed it.

    Every exception of pyserial and every OSError of a port becomes this error.
    """

    def __init__(self, port: str, reason: str) -> None:
        super().__init__(
            f"lost the connection to {port}: {reason}; plug the board in again, and the job continues by itself"
        )
        self.port, self.reason = port, reason


class NoAnswerError(McuError):
    """The port is open, but the device does not answer."""

    def __init__(self, port: str, request: str, waited_s: float, tries: int) -> None:
        super().__init__(
            f"no answer to {request} from {port} within {waited_s:.1f} s ({tries} tries); is the PORT firmware on the "
            "board, and no other program on this port? Flash it with: port-agent mcu flash"
        )
        self.port, self.request, self.waited_s, self.tries = port, request, waited_s, tries


class DeviceResetError(McuError):
    """The device was reset since the session began; its RAM contains the initial weights again."""

    def __init__(self, port: str, expected_nonce: int, nonce: int) -> None:
        super().__init__(
            f"the device on {port} was reset (boot nonce {nonce:08x}, session began with {expected_nonce:08x}); "
            "restore a snapshot and open a new session"
        )
        self.port, self.expected_nonce, self.nonce = port, expected_nonce, nonce


class SequenceError(McuError):
    """Another program used the device in between, so exactly-once no longer holds."""

    def __init__(self, port: str, sent: int, expected: int) -> None:
        super().__init__(
            f"the device on {port} expects request {expected}, not {sent}: another program used it meanwhile; "
            "stop that program and restore a snapshot"
        )
        self.port, self.sent, self.expected = port, sent, expected


class RefusedError(McuError):
    """The device answered with an error status."""

    def __init__(self, request: str, status: str, remedy: str) -> None:
        super().__init__(f"the device rejected {request}: {status}; {remedy}")
        self.request, self.status = request, status


class PagesFailedError(RefusedError):
    """External memory for the model's pages failed during a step; restore a snapshot before continuing."""


class IncompatibleError(McuError):
    """Firmware, model or board do not match the job; the message says how to reflash."""

    exit_code = ExitCode.IMPOSSIBLE


class BuildError(McuError):
    """The firmware cannot be built: no compiler, a compiler error, or a model that does not fit the board."""

    exit_code = ExitCode.IMPOSSIBLE


class TooLargeError(BuildError):
    """The model does not fit the board."""

    def __init__(self, board: str, memory: str, overflow_bytes: int, remedy: str) -> None:
        super().__init__(f"the model does not fit {board}: {memory} is {overflow_bytes:,} bytes too small; {remedy}")
        self.board, self.memory, self.overflow_bytes = board, memory, overflow_bytes


class FirmwareWriteError(McuError):
    """The firmware could not be written to the board."""


class PortNotFoundError(McuError):
    """No port matches the selector."""


class SimulatorError(McuError):
    """The simulated board could not be started, or ended by itself."""


class SnapshotError(McuError):
    """A snapshot file cannot be used."""


class BoardJobError(McuError):
    """A job description or its data cannot be used."""

    exit_code = ExitCode.IMPOSSIBLE
