"""What both tiers share: the packages, and whether this machine can run them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.systemd import packages
from tests.systemd.machine import CACHE


@pytest.fixture(scope="session")
def root_only() -> None:
    """Skip where the tests are not root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: systemd-nspawn, mmdebstrap")


PackageBuilder = Callable[..., Path]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> PackageBuilder:
    """Return a function that builds a variant of the package once: `package(suffix, dies_at_start=...)`."""
    debs, scratch = tmp_path_factory.mktemp("debs"), tmp_path_factory.mktemp("sources")
    built: dict[tuple[str, bool, bool], Path] = {}

    def build(suffix: str = "", *, dies_at_start: bool = False, broken: bool = False) -> Path:
        key = (suffix, dies_at_start, broken)
        if key not in built:
            built[key] = packages.build(debs, scratch, suffix, dies_at_start=dies_at_start, broken=broken)
        return built[key]

    return build


@pytest.fixture(scope="session")
def cache() -> Path:
    """Return where the systems under test are kept between runs."""
    return CACHE
