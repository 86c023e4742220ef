"""A system under test: something that runs shell commands as root, be it an emulated machine or a container."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ran:
    """One command in the system under test: exit code and merged output."""

    command: str
    rc: int
    out: str


class Host(Protocol):
    """What a scenario needs of the system that it runs in."""

    def run(self, command: str, timeout_s: float = 300.0) -> Ran:
        """Run a shell command and return its end; 124 when it took longer than the limit."""


def check(host: Host, command: str, timeout_s: float = 300.0) -> str:
    """Return the output of a command that must succeed, without the line end."""
    ran = host.run(command, timeout_s)
    assert ran.rc == 0, f"`{command}` gave {ran.rc}:\n{ran.out}"
    return ran.out.strip()


def wait_for(host: Host, condition: str, timeout_s: float = 120.0) -> None:
    """Return when a shell condition holds in the system; the waiting loop runs in there."""
    loop = (
        f"end=$(( $(date +%s) + {int(timeout_s)} )); until {condition}; do "
        "[ $(date +%s) -lt $end ] || exit 1; sleep 0.2; done"
    )
    ran = host.run(loop, timeout_s + 60)
    if ran.rc != 0:
        journal = host.run("journalctl -u port-agent -n 40 --no-pager -o cat").out
        raise AssertionError(f"not within {timeout_s:.0f} s: {condition}\n{ran.out[-1000:]}\njournal:\n{journal}")


def show(host: Host, key: str, unit: str = "port-agent") -> str:
    """Return one property of a unit."""
    return check(host, f"systemctl show --property={key} --value {unit}")
