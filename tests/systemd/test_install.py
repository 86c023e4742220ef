"""`deploy/install.sh` on a bare Debian, and what it says where it cannot go on."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd import packages
from tests.systemd.conftest import PackageBuilder
from tests.systemd.container import Container
from tests.systemd.host import check, show

SCRIPT = packages.CHECKOUT / "deploy/install.sh"
SOURCE = "/mnt/source"
CERTIFICATES = Path("/etc/ssl/certs")


def refused(directory: Path, *words: str, **commands: str) -> str:
    """Return what the script says on a machine where some commands answer differently; it must fail at once."""
    answers = {"id": "echo 0", "dpkg": "echo amd64", "apt-get": "echo apt-get was called; exit 99", "df": "echo 9999"}
    for name, script in {**answers, **commands}.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    environment = {"PATH": f"{directory}:{os.environ['PATH']}"}
    ran = subprocess.run(
        ["bash", str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode not in (0, 99), ran.stdout + ran.stderr
    assert "apt-get was called" not in ran.stdout, "nothing may be installed before it is known that it can go on"
    return ran.stderr


@pytest.mark.process
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
@pytest.mark.parametrize(
    ("words", "commands", "said"),
    [
        ((), {"id": "echo 1000"}, "needs root: sudo"),
        ((), {"dpkg": "echo armhf"}, "armhf has no torch wheels; on a Pi 3 or later install the 64-bit"),
        (("--user", "ann"), {"id": '[ "$1" = -u ] && echo 0'}, "there is no user ann; --no-user"),
        (("--user",), {}, "--user needs a name"),
        (("--wat",), {}, "usage: install.sh"),
        (("/nowhere.deb",), {}, "/nowhere.deb is not a Debian package"),
        ((str(SCRIPT),), {}, "is not a Debian package"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_changed(
    words: tuple[str, ...], commands: dict[str, str], said: str, tmp_path: Path
) -> None:
    assert said in refused(tmp_path, *words, **commands)


@pytest.mark.process
@pytest.mark.skipif(Path("/opt/port-agent/current").is_symlink(), reason="PORT agent is installed on this machine")
def test_a_full_disk_is_said_with_both_numbers(tmp_path: Path) -> None:
    said = refused(tmp_path, "--no-user", df="echo Avail; echo 812")
    assert "812 MB free in /opt" in said and "need 2500 MB" in said


@pytest.fixture
def bare(tree: Path, runtime: Path, site: dict[str, Path], package: PackageBuilder) -> Iterator[Container]:
    """Return a booted Debian with a network and this checkout, where nothing of ours is installed."""
    mounts = {"/mnt/packages": package().parent, SOURCE: packages.CHECKOUT, "/opt/port-agent/runtimes": runtime, **site}
    mounts[str(CERTIFICATES)] = CERTIFICATES  # a network that is looked into has its own authority
    with Container(tree, mounts, network=True) as running:
        if running.run("apt-get update -q", 300).rc != 0:
            pytest.skip("the container reaches no Debian mirror")
        yield running


def install(container: Container, *words: str) -> str:
    """Run the script with pip's certificates configured, and return its output."""
    pip = f"PIP_CERT={CERTIFICATES}/ca-certificates.crt PORT_SETTLE_S=1"
    return check(container, f"{pip} {SOURCE}/deploy/install.sh {' '.join(words)} 2>&1", 900)


@pytest.mark.long
@pytest.mark.root
def test_a_package_is_installed_for_a_user_upgraded_and_rolled_back(bare: Container, package: PackageBuilder) -> None:
    check(bare, "useradd --create-home ann")
    said = install(bare, f"/mnt/packages/{package().name}", "--user ann")
    assert "ann may use port-agent after the next login" in said
    assert "idle" in check(bare, "runuser -l ann -c 'port-agent status'")
    assert (show(bare, "ActiveState"), show(bare, "UnitFileState")) == ("active", "enabled")
    check(bare, "echo '# mine' >> /etc/port-agent/config.toml")
    install(bare, f"/mnt/packages/{package('.post1').name}", "--no-user")
    assert "# mine" in check(bare, "cat /etc/port-agent/config.toml")
    failed = bare.run(
        f"{SOURCE}/deploy/install.sh /mnt/packages/{package('.post2', dies_at_start=True).name} --no-user"
    )
    assert failed.rc != 0 and "was rolled back" in failed.out and "install.sh: the package is not set up" in failed.out
    version = packages.checkout_version()
    assert f"current {version}.post1," in check(bare, "/usr/lib/port-agent/port-agent-versions list")
    assert show(bare, "ActiveState") == "active"


@pytest.mark.long
@pytest.mark.root
def test_a_checkout_is_built_and_installed(bare: Container) -> None:
    install(bare, "--no-user")
    assert show(bare, "ActiveState") == "active"
    check(bare, "port-agent status --json")
    check(bare, "grep -q run-now /usr/share/bash-completion/completions/port-agent")
    found = check(bare, "port-agent doctor --no-flash; true")
    assert "allocator: budget-aware allocator" in found, "it was compiled on this machine"


@pytest.mark.long
@pytest.mark.root
def test_without_dependencies_to_be_had_it_says_where_to_put_them(bare: Container, package: PackageBuilder) -> None:
    check(bare, "umount /opt/port-agent/runtimes && mkdir /empty")
    deb = f"/mnt/packages/{package().name}"
    failed = bare.run(f"PORT_WHEELHOUSE=/empty {SOURCE}/deploy/install.sh {deb} --no-user", 300)
    assert failed.rc != 0
    assert "pip could not install the dependencies from /empty" in failed.out and "PORT_WHEELHOUSE" in failed.out
    assert show(bare, "ActiveState") == "inactive"
