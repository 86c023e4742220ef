"""The simulated board for the tests of `port-agent mcu`, and what a wide terminal shows."""

from collections.abc import Callable

import pytest
from rich.console import RenderableType

from port_agent.cli.daemon_views import show
from tests.agent.mcu.simulated_board import built, model, simulator

__all__ = ["built", "model", "shown", "simulator"]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[RenderableType], str]:
    """Return what a wide terminal shows of a screen."""

    def text(screen: RenderableType) -> str:
        monkeypatch.setenv("COLUMNS", "200")
        show(screen)
        return capsys.readouterr().out

    return text
