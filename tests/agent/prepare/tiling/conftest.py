"""Fixtures of several test modules: a cache of their own, and a job whose convolutions' gradients run in halves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.prepare.tiling.split_gradients import with_split_gradients
from port_agent.prepare.tiling.tiled_job import TiledJob
from port_planner import make_bundle
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.agent.prepare.tiling.small_jobs import ROOM, whole


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
def split(cached_once: None) -> tuple[make_bundle.CapturedJob, MeasuredCosts, TiledJob]:
    """The job as recorded, what it was measured to take, and its convolutions' gradients in halves."""
    captured, measured = whole()
    return captured, measured, with_split_gradients(captured, measured, ROOM, 2.0, lambda *_: None)
