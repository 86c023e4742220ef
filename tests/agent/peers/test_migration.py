"""A job that moves between real agents in namespaces (`make check-peers`): pulled cables and plugs, a full
disk. The test worker trains.
"""

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from port_agent.jobs.job import JobState
from tests.agent.federate.agents import pair_all, running
from tests.agent.live_daemon import BUNDLE
from tests.agent.peers.bridge import Host, Network, network
from tests.agent.supervisor.migration.agents import TAKES, Mover, at_home, settled
from tests.waiting import until, wait_until_drawn_moment

LONG = {**BUNDLE, "steps": 6000}
"""A minute and more of training."""

pytestmark = [pytest.mark.root, pytest.mark.long]


@contextmanager
def two_devices(root: Path) -> Iterator[tuple[Network, Host, Mover, Mover]]:
    """Give a network, the owner's place, an owner on battery and a device that takes jobs, which have met."""
    with network() as net:
        bridge = net.bridge()
        hosts = [net.host(bridge, f"10.82.0.{number}/24") for number in (1, 2)]
        attic, cellar = (
            Mover(root / name, (host.address, 9478), ["ip", "netns", "exec", host.namespace])
            for name, host in zip(("attic", "cellar"), hosts, strict=True)
        )
        attic.allow("")
        cellar.allow(TAKES)
        attic.plug(online=False)
        pair_all([attic, cellar])
        with running([attic, cellar]):
            yield net, hosts[0], attic, cellar


def test_cables_and_plugs_are_pulled_while_it_is_away(tmp_path: Path) -> None:
    expected = at_home(tmp_path, LONG)
    with two_devices(tmp_path) as (net, host, attic, cellar):
        attic.give(LONG)
        until(lambda: attic.own()["step"] > 100, attic.own)
        net.unplug(host)
        until(lambda: "not reached" in attic.own()["reason"], attic.own)
        assert attic.own()["state"] == "away", "while nobody can be asked, the other device has it"
        cellar.kill()
        net.plug_in(host)
        cellar.start()
        attic.restart()
        step = attic.own()["step"]
        until(lambda: attic.own()["step"] > step, attic.own)
        attic.client.post("/v1/jobs/job/recall")
        back = attic.until(JobState.QUEUED)
        print(f"\nback at step {back['step']} of {LONG['steps']}")
        assert back["step"] > step
        attic.plug(online=True)
        attic.until(JobState.FINISHED, patience_s=300.0)
        assert attic.result() == expected
        until(lambda: settled(attic, cellar), attic.own)


def test_a_disk_that_fills_there_loses_nothing_here(tmp_path: Path) -> None:
    bundle = {**BUNDLE, "padding": "x" * 100_000}
    expected = at_home(tmp_path, bundle)
    full = tmp_path / "cellar/state/moving"
    full.mkdir(parents=True)
    (tmp_path / "cellar/state").chmod(0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(full)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with two_devices(tmp_path) as (_, _host, attic, cellar):
            attic.give(bundle)
            until(lambda: "No space left" in attic.own()["reason"], attic.own)
            assert attic.own()["state"] == "queued" and cellar.all() == []
            attic.plug(online=True)
            attic.until(JobState.FINISHED)
            assert attic.result() == expected
    finally:
        subprocess.run(["umount", "-l", str(full)], check=False, capture_output=True)


MOVES, SHORT = 45, {**BUNDLE, "steps": 150}


def test_many_jobs_move_while_anybody_is_killed_and_cables_are_cut(tmp_path: Path) -> None:
    """Each job is submitted, moves, is disturbed once to three times, and comes back with the
    weights of a run at home.
    """
    numbers, done = random.Random(45), dict.fromkeys(("the owner killed", "the other killed", "the cable cut"), 0)
    with two_devices(tmp_path) as (net, host, attic, cellar):
        for move in range(MOVES):
            name, bundle = f"job{move}", {**SHORT, "seed": move}
            attic.give(bundle, name)
            for _ in range(numbers.randint(1, 3)):
                wait_until_drawn_moment(numbers, 2.0)
                what = numbers.choice(sorted(done))
                done[what] += 1
                if what == "the cable cut":
                    net.unplug(host)
                    wait_until_drawn_moment(numbers, 1.0)
                    net.plug_in(host)
                else:
                    (attic if what == "the owner killed" else cellar).restart()
            until(lambda name=name: attic.own(name)["state"] == "finished", lambda name=name: attic.own(name))  # type: ignore[misc]
            attic.client.download(f"/v1/jobs/{name}/result", tmp_path / "fetched")
            assert json.loads((tmp_path / "fetched").read_text()) == at_home(tmp_path / f"home{move}", bundle), name
            assert any("cellar" in entry["text"] for entry in attic.own(name)["history"]), "it never left"
        until(lambda: cellar.all() == [], cellar.all)
    print(f"{MOVES} jobs moved; {', '.join(f'{what} {count} times' for what, count in done.items())}")
    assert all(done.values())
