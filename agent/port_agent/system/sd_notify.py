"""Report our state to systemd (READY, STATUS, WATCHDOG) over the notify socket."""

import os
import socket
from collections.abc import MutableMapping


class Notifier:
    """Sends sd_notify messages; does nothing outside systemd."""

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Remove systemd's variables from the environment, so that workers and sensors cannot
        send messages in our name.
        """
        values = os.environ if environment is None else environment
        address = values.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        pid = values.pop("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        usec = values.pop("WATCHDOG_USEC", "")
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and int(usec) > 0 and ours else None
        """Seconds between the reports that systemd expects; None if it does not watch."""

    def send(self, **fields: object) -> None:
        """Send one message, such as `send(READY=1, STATUS="waiting")`.

        A message that cannot be sent is dropped without an error.
        """
        if not self._address:
            return
        text = "\n".join(f"{name}={str(value).replace(chr(10), ' ')}" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                sock.sendto(text.encode(), self._address)
            except OSError:
                return
