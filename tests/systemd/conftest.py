"""What both tiers share: the packages, and whether this machine can run them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import versions
from tests.systemd import packages
from tests.systemd.container import probe
from tests.systemd.machine import CACHE

CONTAINER_SUITE = "bookworm"
SITE = "/mnt/site-packages"


@pytest.fixture(scope="session")
def root_only() -> None:
    """Skip where the tests are not root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: systemd-nspawn, mmdebstrap")


PackageBuilder = Callable[..., Path]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> PackageBuilder:
    """Return a function that builds a variant of the package once: `package(suffix, dies_at_start=...)`."""
    debs, scratch = tmp_path_factory.mktemp("debs"), tmp_path_factory.mktemp("roots")
    built: dict[str, Path] = {}

    def build(suffix: str = "", **flaws: bool) -> Path:
        if "" not in built:
            built[""] = packages.build(debs)
        if suffix not in built:
            built[suffix] = packages.variant(built[""], scratch, suffix, **flaws)
        return built[suffix]

    return build


@pytest.fixture(scope="session")
def cache() -> Path:
    """Return where the systems under test are kept between runs."""
    return CACHE


@pytest.fixture(scope="session")
def tree(root_only: None, cache: Path) -> Path:
    """Return the root file system; built once when the tools for it are installed."""
    path = cache / f"tree-{CONTAINER_SUITE}"
    if not (cache / f"tree-{CONTAINER_SUITE}.stamp").exists():
        if shutil.which("mmdebstrap") is None or shutil.which("systemd-nspawn") is None:
            pytest.skip("needs mmdebstrap and systemd-nspawn; `make check-systemd` installs them")
        build = [str(packages.CHECKOUT / "deploy/vm/build.sh"), "tree", CONTAINER_SUITE]
        built = subprocess.run(build, capture_output=True, text=True, check=False)
        if built.returncode != 0:
            pytest.skip(f"could not build the {CONTAINER_SUITE} root file system: {built.stderr[-300:]}")
    reason = probe(path)
    if reason is not None:
        pytest.skip(reason)
    return path


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a runtime directory that borrows this environment's packages instead of fetching 1 GB again."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the container runs CPython 3.11 on this environment's packages, which are for another version")
    settings = versions.Settings.read(Path("/nonexistent"), {})
    root = tmp_path_factory.mktemp("runtimes")
    directory = root / versions.Payload(packages.CHECKOUT / "deploy").runtime_id(settings)
    directory.mkdir()
    root.chmod(0o755)  # pytest's directories are for their owner only
    for entry in site_packages().iterdir():
        if "port_agent" not in entry.name and entry.suffix != ".pth":
            (directory / entry.name).symlink_to(f"{SITE}/{entry.name}")
    (directory / ".complete").touch()
    return root


@pytest.fixture(scope="session")
def site() -> dict[str, Path]:
    """Return what a container must mount for `runtime`: this environment's packages."""
    return {SITE: site_packages()}


def site_packages() -> Path:
    """Return where this environment's packages lie."""
    found = Path(pytest.__file__).resolve().parents[1]
    assert found.name == "site-packages"
    return found
