"""Programs of these tests keep their plans in a folder of the test run, and budgets start at what the process needs."""

import gc
import os

import pytest

from port_agent.intercept.residency.memory import resident_now
from port_agent.malloc import release_free_memory


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def held_bytes() -> int:
    """What the process holds: what the tests before this one left free would be room beyond any budget above it."""
    gc.collect()
    release_free_memory()
    return resident_now()
