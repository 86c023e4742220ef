"""Other devices in a terminal: paired ones first, others as they call themselves."""

from typing import Any

from port_agent.cli.peers.views import peers_screen

OFF: dict[str, Any] = {
    "discover": False, "interfaces": [], "name": None, "id": None, "peers": None, "device_id": None, "port": None, "shares": False, "solves": False, "takes_jobs": False, "memberships": [], "paired": [], "federations": [], "introduces": False, "introducer": None, "introducer_trouble": "",
    "own": {"name": "attic", "board": "Pi 4", "state": "idle", "charging": None, "job": None, "progress": None, "today_joules": None, "is_measured": False, "id": "Z-A", "version": "1"},
    "history": [],
}  # fmt: skip
ON: dict[str, Any] = {**OFF, "discover": True, "name": "attic", "id": "ab", "peers": []}
PAIRED: dict[str, Any] = {
    "id": "O2JMHLJ-VIC5YAH", "short": "cd", "name": "cellar", "is_connected": True, "last_heard_s": 3, "board": "Pi 5",
    "state": "training", "charging": True, "job": "[b]birds[/b]", "progress": 0.257, "today_joules": 4200.0, "is_measured": True,
    "trouble": "", "address": ["10.0.0.2", 9478], "version": "0.1.0", "paired_at": 0.0, "introduced_by": None,
}  # fmt: skip
SEEN = {
    "name": "[bold]evil[/bold]",
    "board": "b",
    "state": "unknown",
    "version": "1",
    "address": None,
    "last_seen_s": 0,
    "id": "ef",
}


def test_nobody_and_nothing(shown: Any) -> None:
    assert "discovery is off; set discover = true" in shown(peers_screen(OFF))
    out = shown(peers_screen(ON))
    assert "no other agent seen" in out and "attic (ab), announced nowhere" in out


def test_other_agents_are_shown_as_they_call_themselves(shown: Any) -> None:
    peers = [SEEN, {**SEEN, "last_seen_s": 30}]
    out = shown(peers_screen({**ON, "interfaces": ["eth0"], "peers": peers}))
    assert out.count("[bold]evil[/bold]") == 2 and "now" in out and "30.0 s ago" in out and "announced on eth0" in out
    assert "not paired; these names are unverified" in out


def test_a_paired_device_with_what_it_does(shown: Any) -> None:
    out = shown(
        peers_screen({**ON, "device_id": "X-Y", "port": 9478, "paired": [PAIRED], "peers": [{**SEEN, "id": "cd"}]})
    )
    for word in ("cellar", "Pi 5", "yes", "training", "[b]birds[/b] 26 %", "4.2", "3.0 s ago", "O2JMHLJ"):
        assert word in out
    assert "evil" not in out and "no agents seen besides the paired ones" in out, "listed once"
    assert "attic (this device)" in out and "energy today of 1 of 2 devices: 4.2" in out and "estimated" not in out
    assert "its id: X-Y" in out and "call at port 9478" in out


def test_jobs_rounds_and_energy_of_all(shown: Any) -> None:
    led = {
        "name": "birds",
        "done": 2,
        "rounds": 9,
        "training": ["attic", "cellar"],
        "waits": "",
        "loss": 0.25,
        "awaited": {"cellar": "works on it"},
    }
    waiting = {**led, "name": "bees", "done": 0, "training": [], "waits": "1 of 3 devices are ready", "loss": None}
    own = {**OFF["own"], "today_joules": 1800.0, "job": "moths", "progress": 0.5}
    out = shown(peers_screen({**OFF, "own": own, "paired": [PAIRED], "federations": [led, waiting]}))
    assert (
        "birds: this device leads, 2 of 9 rounds, loss 0.2500; round 3 on attic, cellar; waiting for cellar: works on "
        "it" in out
    )
    assert "bees: this device leads, 0 of 9 rounds; waiting: 1 of 3 devices are ready" in out
    member = {"name": "wasps", "leader": "shed", "round": 4, "waits": "to train: not charging"}
    joined = shown(peers_screen({**OFF, "memberships": [member, {**member, "name": "ants", "round": None}]}))
    assert "wasps: shed leads, round 4; waiting: to train: not charging" in joined
    assert "ants: shed leads; waiting: to train: not charging" in joined
    assert "moths 50 %" in out and "energy today of 2 of 2 devices: 6.0" in out and "(~: estimated)" in out


def test_a_paired_device_that_is_gone_says_since_when_and_why(shown: Any) -> None:
    gone = {
        **PAIRED,
        "is_connected": False,
        "last_heard_s": 90,
        "is_measured": False,
        "progress": None,
        "charging": False,
    }
    out = shown(peers_screen({**OFF, "paired": [gone], "history": [{"at": 0.0, "text": "paired with cellar"}]}))
    assert "offline" in out and "s ago" in out and "~4.2" in out and "on battery" in out and "paired with cellar" in out
    never = {**gone, "last_heard_s": None, "trouble": "no answer", "today_joules": None, "job": None, "charging": None}
    assert "cellar is not reached: no answer" in shown(peers_screen({**OFF, "paired": [never]}))
    assert "never since the start" in shown(peers_screen({**OFF, "paired": [{**never, "trouble": ""}]}))


def test_what_paired_devices_may_have_of_this_one(shown: Any) -> None:
    assert "may have" not in shown(peers_screen(OFF))
    out = shown(peers_screen({**OFF, "shares": True, "solves": True, "takes_jobs": True}))
    told = {"introduces": True, "introducer": "attic", "introducer_trouble": "no answer"}
    chosen = shown(peers_screen({**OFF, **told, "paired": [{**PAIRED, "introduced_by": "X"}, PAIRED]}))
    assert (
        "introduces paired devices to each other" in chosen
        and "others to this device: 1 so far; currently unreachable" in chosen
    )
    assert "may read its costs and plans" in out and "may have it solve their plans" in out
