"""Fixtures of several test modules: a cache of their own, and a job whose convolutions' gradients run in halves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.prepare.slices.halves import in_halves
from port_agent.prepare.slices.sliced import Sliced
from port_planner import make_bundle
from port_planner.profiling.operators import Measured
from tests.agent.prepare.slices.small_jobs import ROOM, whole


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def cached_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made once for this module measures into a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def halves(cached_once: None) -> tuple[make_bundle.Prepared, Measured, Sliced]:
    """The job as recorded, what it was measured to take, and its convolutions' gradients in halves."""
    prepared, measured = whole()
    return prepared, measured, in_halves(prepared, measured, ROOM, 2.0, lambda *_: None)
