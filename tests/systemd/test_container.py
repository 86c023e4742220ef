"""The fast tier: the package, its unit and its versions under a real systemd in a container."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd import packages, training
from tests.systemd.conftest import PackageBuilder
from tests.systemd.container import Container
from tests.systemd.host import check, show, wait_for

pytestmark = pytest.mark.root

PACKAGES = "/mnt/packages"


@pytest.fixture
def container(tree: Path, runtime: Path, site: dict[str, Path], package: PackageBuilder) -> Iterator[Container]:
    """Return a freshly booted container with the package installed and running."""
    deb = package()
    mounts = {PACKAGES: deb.parent, "/opt/port-agent/runtimes": runtime, **site}
    with Container(tree, mounts) as running:
        install(running, deb)
        yield running


def install(container: Container, deb: Path) -> str:
    """Install a package and return what dpkg said."""
    return check(container, f"PORT_SETTLE_S=1 dpkg -i --force-confdef --force-confold {PACKAGES}/{deb.name}")


def test_installed_agent_is_ready_hardened_and_reachable(container: Container) -> None:
    assert show(container, "ActiveState") == "active"
    assert show(container, "User") == "port-agent"
    assert check(container, "systemctl is-enabled port-agent") == "enabled"
    assert check(container, "stat -c '%U %a' /var/lib/port-agent /run/port-agent").split("\n") == [
        "port-agent 750",
        "port-agent 750",
    ]
    assert check(container, "stat -c '%G %a' /var/lib/port-agent/inbox") == "port-agent 3770"
    assert "port-agent" in check(container, "id -nG port-agent") and "dialout" in check(container, "id -nG port-agent")
    site = "/opt/port-agent/current/lib/python3.11/site-packages"
    check(container, f"ls {site}/port_planner/ir/board_files/*.toml {site}/port_agent/dashboard/static/*.html")
    check(container, "port-agent status --json")
    assert container.run("runuser -u nobody -- port-agent status --json").rc != 0
    check(container, "systemd-analyze security --threshold=21 --no-pager port-agent")
    check(container, "systemd-analyze verify port-agent.service port-agent-rollback.service")


def test_stop_start_and_kill(container: Container) -> None:
    check(container, "systemctl stop port-agent")
    assert show(container, "Result") == "success"
    check(container, "systemctl start port-agent")
    pid = show(container, "MainPID")
    check(container, f"kill -KILL {pid}")
    wait_for(container, f'[ "$(systemctl show --property=NRestarts --value port-agent)" = 1 ] && {is_active()}', 30)
    assert show(container, "MainPID") != pid
    check(container, "port-agent status --json")


def is_active() -> str:
    """Return the shell condition that the agent is ready."""
    return "systemctl is-active --quiet port-agent"


def test_reload_applies_a_good_file_and_refuses_a_bad_one(container: Container) -> None:
    drop_in = "/etc/port-agent/config.d/10-test.toml"
    pid = show(container, "MainPID")
    check(container, f"mkdir -p /etc/port-agent/config.d && printf '[when]\nmin_battery = 55\n' > {drop_in}")
    assert drop_in in check(container, "port-agent reload")
    check(container, "systemctl reload port-agent")
    check(container, f"printf '[when]\nmin_batery = 55\n' > {drop_in}")
    refused = container.run("port-agent reload")
    assert refused.rc != 0 and f"{drop_in}:2" in refused.out and "min_battery" in refused.out
    assert container.run("systemctl reload port-agent").rc != 0
    assert (show(container, "ActiveState"), show(container, "MainPID")) == ("active", pid)


def test_hung_supervisor_is_restarted(container: Container) -> None:
    check(container, "mkdir -p /etc/systemd/system/port-agent.service.d")
    drop_in = r"[Service]\nWatchdogSec=3\nTimeoutAbortSec=1\nRestartSec=1\n"
    check(container, f"printf '{drop_in}' > /etc/systemd/system/port-agent.service.d/watchdog.conf")
    check(container, "systemctl daemon-reload && systemctl restart port-agent")
    pid = show(container, "MainPID")
    check(container, f"kill -STOP {pid}")
    wait_for(container, f'[ "$(systemctl show --property=MainPID --value port-agent)" != {pid} ] && {is_active()}', 40)
    assert "Watchdog timeout" in check(container, "journalctl -u port-agent --no-pager -o cat")
    check(container, "port-agent status --json")


def test_job_trains_pauses_on_battery_and_finishes(container: Container, package: PackageBuilder) -> None:
    bundle = training.make_bundle(package().parent)
    training.configure(container)
    check(container, "systemctl restart port-agent")  # where sensors lie is read at the start only
    training.submit(container, f"{PACKAGES}/{bundle.name}", "--steps 4000 --checkpoint-every 500")
    training.wait_for_job(container, "step", ">= 100", 180)
    training.plug(container, inserted=False)
    wait_for(container, "! pgrep -f '[p]ort_agent.training.worker' >/dev/null", 20)
    assert any("on battery" in reason for reason in training.status(container)["reasons"])
    stopped_at = training.job(container)["step"]
    training.plug(container, inserted=True)
    training.wait_for_job(container, "step", f"> {stopped_at}", 180)
    training.wait_for_job(container, "state", "== 'finished'", 400)
    assert training.job(container)["step"] == 4000
    assert training.trained_weights(container)


def test_upgrade_keeps_state_and_one_version_to_go_back_to(container: Container, package: PackageBuilder) -> None:
    check(container, "echo kept > /var/lib/port-agent/inbox/sample && echo '# mine' >> /etc/port-agent/config.toml")
    install(container, package(".post1"))
    first, second = packages.checkout_version(), f"{packages.checkout_version()}.post1"
    listed = check(container, "/usr/lib/port-agent/port-agent-versions list")
    assert f"current {second}, previous {first}, trial None" in listed
    assert show(container, "ActiveState") == "active"
    assert f"/versions/{second}/" in check(container, "tr '\\0' ' ' < /proc/$(pidof -s -x port-agent)/cmdline")
    assert check(container, "cat /var/lib/port-agent/inbox/sample") == "kept"
    assert "# mine" in check(container, "cat /etc/port-agent/config.toml")
    check(container, "/usr/lib/port-agent/port-agent-versions rollback")
    assert f"current {first}" in check(container, "/usr/lib/port-agent/port-agent-versions list")
    assert show(container, "ActiveState") == "active"


def test_version_that_does_not_start_is_rolled_back(container: Container, package: PackageBuilder) -> None:
    dead = package(".post2", dies_at_start=True)
    ran = container.run(f"dpkg -i {PACKAGES}/{dead.name}")
    assert ran.rc != 0
    assert "was rolled back" in ran.out
    listed = check(container, "/usr/lib/port-agent/port-agent-versions list")
    assert f"current {packages.checkout_version()}," in listed and "trial None" in listed
    assert show(container, "ActiveState") == "active"
    assert ".post2" not in show(container, "Description"), "the old version's own unit must be back too"
    check(container, "port-agent status --json")
    install(container, package(".post1"))
    assert ".post1" in show(container, "Description"), "a working version brings its own unit again"


def test_version_that_does_not_even_load_is_never_switched_to(container: Container, package: PackageBuilder) -> None:
    pid = show(container, "MainPID")
    ran = container.run(f"dpkg -i {PACKAGES}/{package('.post3', broken=True).name}")
    assert ran.rc != 0
    assert "does not run at all" in ran.out
    assert show(container, "MainPID") == pid, "the running version goes on untouched"


def test_power_cut_during_the_trial_is_rolled_back_at_boot(container: Container, package: PackageBuilder) -> None:
    """What is on disk when the power fails after the switch and before the start: the version on trial never ran."""
    dead = package(".post2", dies_at_start=True)
    version = packages.checkout_version()
    check(container, "systemctl disable --now port-agent")
    check(container, f"dpkg -i {PACKAGES}/{dead.name}")
    assert f"trial {version}.post2" in check(container, "/usr/lib/port-agent/port-agent-versions list")
    check(container, "mkdir -p /etc/systemd/system/port-agent.service.d")
    drop_in = "/etc/systemd/system/port-agent.service.d/quick.conf"
    check(container, f"printf '[Service]\\nRestartSec=100ms\\n' > {drop_in} && systemctl daemon-reload")
    container.run("systemctl enable port-agent; systemctl start --no-block port-agent")
    wait_for(container, f"/usr/lib/port-agent/port-agent-versions list | grep -q 'current {version},'", 60)
    wait_for(container, is_active(), 30)
    check(container, "port-agent status --json")


def test_removal_keeps_data_and_purge_takes_it(container: Container) -> None:
    check(container, "echo mine > /var/lib/port-agent/inbox/data; umount /opt/port-agent/runtimes")
    check(container, "dpkg -r port-agent")
    assert container.run("pidof -x port-agent").rc != 0
    assert check(container, "ls -A /opt") == ""
    assert check(container, "cat /var/lib/port-agent/inbox/data") == "mine"
    check(container, "test -e /etc/port-agent/config.toml")
    check(container, "dpkg -P port-agent")
    left = "/var/lib/port-agent /run/port-agent /etc/port-agent /usr/lib/port-agent /opt/port-agent"
    assert check(container, f"for path in {left}; do [ ! -e $path ] || echo $path; done") == ""
    assert container.run("getent passwd port-agent").rc != 0
