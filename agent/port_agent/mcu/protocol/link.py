"""The connection of a job to its board: opens it, checks firmware and model, and finds the board again after an unplug.

After an unplug there are two cases. If the board kept its power and its boot nonce, the session continues where it was,
even in the middle of a request. If it was reset, DeviceResetError is raised and the job restores its snapshot.
"""

from collections.abc import Callable

from port_agent.mcu.board.board_errors import DisconnectedError, IncompatibleError, McuError, PortNotFoundError
from port_agent.mcu.protocol.board_model import ModelDirectory
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.ports import PortSelector, find_port, require_port, selector_of
from port_agent.mcu.protocol.queries import DeviceInfo
from port_agent.mcu.protocol.session import DEFAULT_PATIENCE, Patience, Session
from port_agent.mcu.protocol.transport import SerialTransport, Transport

Opener = Callable[[str], Transport]
Waiter = Callable[[float], None]
POLL_S = 1.0


def check_model(info: DeviceInfo, model: ModelDirectory, port: str) -> None:
    """Raise IncompatibleError, with the command that helps, unless the device has exactly this model."""
    if info.model_hash == model.sha256:
        return
    raise IncompatibleError(
        f"the board on {port} ({info.board}, firmware {info.firmware_version}) holds model {info.model!r} "
        f"{info.model_hash.hex()[:12]}, but the job needs {model.name!r} {model.sha256.hex()[:12]}; reflash with: "
        f"port-agent mcu flash --board {info.board} {model.path}"
    )


class Link:
    """One board, reconnected as often as needed."""

    def __init__(
        self,
        selector: PortSelector,
        model: ModelDirectory | None = None,
        patience: Patience = DEFAULT_PATIENCE,
        opener: Opener = SerialTransport,
    ) -> None:
        self._selector = selector
        self._model = model
        self._patience = patience
        self._opener = opener
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """Return the device; raise DisconnectedError before `connect`."""
        if self._device is None:
            raise DisconnectedError(str(self._selector), "not connected yet")
        return self._device

    def connect(self) -> Device:
        """Open a new session.

        Raises PortNotFoundError, DisconnectedError, NoAnswerError or IncompatibleError.
        """
        port = require_port(self._selector)
        if self._selector == PortSelector():
            self._selector = selector_of(port)
        transport = self._opener(port.path)
        try:
            device = Device(Session(transport, self._patience))
            if self._model is not None:
                check_model(device.info, self._model, port.path)
        except McuError:
            transport.close()
            raise
        self._device = device
        return device

    def reattach(self, wait: Waiter, give_up: Callable[[], bool]) -> bool:
        """Wait for the board and continue the same session; return False if `give_up()` is true first.

        Raises DeviceResetError if the board has lost its state; call `connect` then.
        """
        device = self.device
        device.session.close()
        while not give_up():
            port = self._find()
            if port is None:
                wait(POLL_S)
                continue
            try:
                device.session.attach(self._opener(port))
            except DisconnectedError:
                wait(POLL_S)
                continue
            return True
        return False

    def close(self) -> None:
        """Close the port."""
        if self._device is not None:
            self._device.session.close()

    def _find(self) -> str | None:
        try:
            port = find_port(self._selector)
        except PortNotFoundError:
            return None  # two ports match for a moment while one of them appears or disappears
        return port.path if port else None
