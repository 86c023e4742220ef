"""Messages to systemd, on a real datagram socket."""

import os
import socket
from pathlib import Path

from port_agent.system.sd_notify import Notifier


def test_notify_speaks_to_systemd(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "10000000", "WATCHDOG_PID": str(os.getpid())}
        taken = dict(environment)
        notifier = Notifier(taken)
        assert taken == {}, "no child process may speak in our name"
        assert notifier.watchdog_s == 10.0
        notifier.send(READY=1, STATUS="two\nlines")
        assert server.recv(4096) == b"READY=1\nSTATUS=two lines"
    notifier.send(WATCHDOG=1)  # systemd is gone: no error
    assert Notifier({**environment, "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier({}).watchdog_s is None
    Notifier({}).send(READY=1)


def test_notify_does_not_wait_for_a_manager_that_does_not_listen(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        notifier = Notifier({"NOTIFY_SOCKET": str(path)})
        for i in range(3000):  # more than the queue of any kernel holds
            notifier.send(STATUS=i)
        assert manager.recv(100) == b"STATUS=0"


def test_notify_on_an_abstract_socket() -> None:
    name = f"port-agent-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(f"\0{name}")
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).send(WATCHDOG=1)
        assert server.recv(4096) == b"WATCHDOG=1"
