"""Where recorded device output lies, and a source whose figures a test writes itself."""

from collections.abc import Callable
from pathlib import Path

import pytest

from port_agent.energy.sources.power_source import Coverage, Kind, SelfTest, SensorReading, SourceError, SourceInfo

LOCAL = Path(__file__).with_name("fixtures")
SHARED = Path(__file__).resolve().parents[3] / "../shared/fixtures"


def local(name: str) -> str:
    """Return the text of a recording kept in the repository."""
    return (LOCAL / name).read_text()


@pytest.fixture
def shared() -> Callable[[str], str]:
    """Give a reader of the full recordings; skip where they are absent."""
    if not SHARED.is_dir():
        pytest.skip("the full recordings (../shared/fixtures) are not here; the excerpts are tested")
    return lambda name: (SHARED / name).read_text()


class ScriptedSource:
    """A source that reads what the test puts into it: watts, a reading, None, or an error text."""

    def __init__(self, name: str = "scripted", kind: Kind = Kind.MEASURED, period_s: float = 1.0) -> None:
        self.info = SourceInfo(name, kind, Coverage.BOARD, "what the test says", 0.001, period_s)
        self.value: float | SensorReading | str | None = 0.0
        self.closed = False

    def read(self, now_s: float) -> SensorReading | None:
        """Return what the test wants."""
        if isinstance(self.value, str):
            raise SourceError(self.info.name, self.value, "plug it in again")
        if isinstance(self.value, float | int):
            return SensorReading(now_s, watts=float(self.value))
        return self.value

    def self_test(self, now_s: float) -> SelfTest:
        """Return that all is well."""
        return SelfTest(True, "scripted")

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True
