"""The table [peers] of the configuration, and what the unit lets the agent do."""

from pathlib import Path

import pytest

from port_agent.policy.config import AgentOptions, ConfigError, read_file

UNIT = Path(__file__).resolve().parents[3] / "systemd/port-agent.service"


def options(tmp_path: Path, text: str) -> AgentOptions:
    path = tmp_path / "config.toml"
    path.write_text(f"[when]\n[peers]\n{text}\n")
    return read_file(path).options


def test_off_unless_asked_for(tmp_path: Path) -> None:
    assert options(tmp_path, "") == AgentOptions() and not AgentOptions().discover_peers
    on = options(tmp_path, 'discover = true\nname = "Büro 2"')
    assert (on.discover_peers, on.peer_name) == (True, "Büro 2")


def test_nothing_is_shared_or_solved_unless_the_owner_says_so(tmp_path: Path) -> None:
    off, on = AgentOptions(), options(tmp_path, "share = true\nsolve = true")
    assert (off.share_with_peers, off.solve_for_peers, on.share_with_peers, on.solve_for_peers) == (
        False,
        False,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("discover = 1", "neither true nor false"),
        ("discovr = true", "did you mean peers.discover"),
        (r'name = "a\u001b[31m"', "not a valid name of at most 40 printable"),
        (f'name = "{"x" * 41}"', "not a valid name of at most 40 printable"),
        ("name = 7", "not a valid name"),
    ],
)
def test_mistakes_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        options(tmp_path, text)
    assert caught.value.line == 3


def test_the_unit_lets_multicast_dns_through() -> None:
    settings = dict(
        line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")
    )
    assert {"AF_INET", "AF_INET6", "AF_NETLINK"} <= set(settings["RestrictAddressFamilies"].split())
    allowed = {"224.0.0.251/32", "ff02::fb/128", "192.168.0.0/16", "100.64.0.0/10", "fe80::/10"}
    assert allowed <= set(settings["IPAddressAllow"].split())
