"""Whoever holds connections keeps nobody else from the control socket."""

import socket
from pathlib import Path

import pytest

from tests.agent.live_daemon import CONFIG, daemon
from tests.attack.connections import hold_connections
from tests.attack.outcome import Survived


@pytest.mark.parametrize(("metrics", "control"), [(60, 60), pytest.param(3000, 300, marks=pytest.mark.long)])
def test_the_control_socket_answers_while_silent_connections_are_held(
    tmp_path: Path, metrics: int, control: int, survived: Survived
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with daemon(tmp_path, CONFIG + f'[metrics]\nlisten = "127.0.0.1:{port}"\n') as client:
        outcome = hold_connections(client, port, metrics=metrics, control=control, asked=20)
        survived(outcome)
