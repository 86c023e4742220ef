"""Three devices federate (`make check-peers`): a small CNN on digits that each has others of,
whatever happens on the way.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as read_numpy
from safetensors.torch import load_file

from port_agent.federate.orders import MESSAGES_FOLDER, global_file
from port_agent.peers.federation_requests import node_number
from port_agent.peers.identity.keys import own_identity
from port_planner.base.units import format_bytes
from port_planner.ir.bundle.bundle import read_manifest
from tests.agent.federate.agents import JOB, Device, pair_all, running
from tests.agent.federate.jobs import alike_bundle, averaged_by_hand, gestures_bundle, needs_flower
from tests.agent.federate.mnist import DIGITS, MNIST, Cnn, digits_test
from tests.agent.peers.bridge import network
from tests.agent.peers.networks import ROOT
from tests.waiting import until, wait_until_drawn_moment

ROUNDS, ROUND_S, LONGER = 14, 30.0, 3.0
"""A round's time, or so many times what all epochs of one device take here alone, if that is more:
a busy machine is slower.
"""
WITHIN = 0.02
"""Of the accuracy of pooled training."""
_SOME_S = 600.0

pytestmark = [needs_flower, pytest.mark.root, pytest.mark.long]


def plan(folder: Path, part: str) -> Path:
    """Return the bundle of one device, or of all data (`pooled`)."""
    bundle = folder / f"{part}.port"
    words = [
        "plan",
        str(ROOT / "tests/agent/federate/mnist.py"),
        "--ram",
        "300M",
        "--strategy",
        "greedy",
        "-o",
        str(bundle),
    ]
    environment = {**os.environ, "PART": part, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "port_agent.cli", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return bundle


def trained(bundle: Path, epochs: int) -> Path:
    """Return the weights that training alone gives."""
    out = bundle.with_suffix(".safetensors")
    words = [
        "--state-dir",
        str(bundle.with_suffix(".state")),
        "--epochs",
        str(epochs),
        "--out",
        str(out),
        "--checkpoint-every",
        "1000",
    ]
    command = [sys.executable, "-m", "port_agent.training.worker", "--bundle", str(bundle), *words]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    return out


def accuracy(weights: Path) -> float:
    """Return the share of test digits that weights tell right."""
    model = Cnn()
    model.load_state_dict(load_file(weights))
    images, labels = digits_test()
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


@contextmanager
def watched_flower(peaks: dict[str, int]) -> Iterator[None]:
    """Note the largest resident size of each of Flower's programs."""
    over = Event()

    def watch() -> None:
        while not over.wait(0.05):
            for path in Path("/proc").glob("[0-9]*"):
                note(path, peaks)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def note(process: Path, peaks: dict[str, int]) -> None:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        status = (process / "status").read_text()
    except OSError:
        return
    for name in (b"port_agent.federate.client", b"port_agent.federate.round"):
        if name in words and "VmHWM:" in status:
            kb = int(status.partition("VmHWM:")[2].split()[0])
            peaks[name.decode()] = max(peaks.get(name.decode(), 0), kb << 10)


def in_round(leader: Device, number: int) -> bool:
    """Return whether a round, this one or a later one, trains on all three devices."""
    found = leader.federation()
    return bool(found["done"] >= number - 1 and len(found["training"]) == 3)


def unplug_in_round(device: Device, leader: Device) -> None:
    """Take a device's power away while it trains, until a round did not wait for it; it may be done with
    its part before it notices.
    """
    while not any(one["lost"].get(device.name) == "no reply in time" for one in leader.federation()["history"]):
        device.plug(online=True)
        until(lambda: in_round(leader, 1) and trains(device), leader.federation, patience_s=_SOME_S)
        begun = leader.federation()["done"]
        device.plug(online=False)
        until(partial(has_done, leader, begun + 1), leader.federation, patience_s=_SOME_S)


def has_done(leader: Device, rounds: int) -> bool:
    return bool(leader.federation()["done"] >= rounds)


def trains(device: Device) -> bool:
    return bool(device.job()["state"] == "running" and device.job()["step"])


@pytest.mark.skipif(not MNIST.is_file(), reason=f"there is no {MNIST.name} beside this checkout")
def test_three_devices_federate_and_come_close_to_pooled_training(tmp_path: Path) -> None:
    parts = [str(number) for number in range(len(DIGITS))]
    bundles = [plan(tmp_path, part) for part in parts]
    pooled = accuracy(trained(plan(tmp_path, "pooled"), ROUNDS))
    begun_s = time.monotonic()
    alone = [accuracy(trained(bundle, ROUNDS)) for bundle in bundles]
    round_s = max(ROUND_S, LONGER * (time.monotonic() - begun_s) / len(bundles))
    peaks: dict[str, int] = {}
    with network() as net:
        bridge = net.bridge()
        hosts = [net.host(bridge, f"10.81.0.{number}/24") for number in (1, 2, 3)]
        devices = [
            Device(tmp_path / name, (host.address, 9478), ["ip", "netns", "exec", host.namespace])
            for name, host in zip(("attic", "cellar", "shed"), hosts, strict=True)
        ]
        pair_all(devices)
        attic, cellar, shed = devices
        with running(devices), watched_flower(peaks):
            for device, bundle in zip(devices, bundles, strict=True):
                device.submit(bundle, epochs=1)
            attic.lead(rounds=ROUNDS, min_devices=2, timeout_s=round_s, min_share=0.6)
            until(lambda: in_round(attic, 3) and trains(cellar), attic.federation, patience_s=_SOME_S)
            cellar.kill()
            until(lambda: attic.met() == 1)
            cellar.start()
            until(lambda: attic.federation()["done"] >= 3, attic.federation, patience_s=_SOME_S)
            unplug_in_round(shed, attic)
            shed.plug(online=True)
            until(lambda: in_round(attic, 7) and trains(attic), attic.federation, patience_s=_SOME_S)
            attic.kill()
            attic.start()
            until(lambda: attic.federation()["state"] == "finished", attic.federation, patience_s=_SOME_S)
            found = attic.federation()
            budgets = [used(device, bundle) for device, bundle in zip(devices, bundles, strict=True)]
            cellar.client.download("/v1/jobs/gestures/result", tmp_path / "averaged.safetensors")
    averaged = accuracy(tmp_path / "averaged.safetensors")
    report(found, alone, pooled, averaged, budgets, peaks)
    assert found["done"] == ROUNDS and averaged > max(alone) and averaged >= pooled - WITHIN
    assert all(peak <= budget for _, peak, budget in budgets)


def used(device: Device, bundle: Path) -> tuple[str, int, int]:
    """Return a device's name, the peak of its worker and the budget of its plan."""
    return device.name, device.job()["measured"]["peak_rss_bytes"], read_manifest(bundle).plans[0].ram_bytes


def report(
    found: dict[str, Any],
    alone: list[float],
    pooled: float,
    averaged: float,
    budgets: list[tuple[str, int, int]],
    peaks: dict[str, int],
) -> None:
    """Print what came of it."""
    print(f"\nalone {', '.join(f'{one:.4f}' for one in alone)}; pooled {pooled:.4f}; federated {averaged:.4f}")
    for one in found["history"]:
        how = (
            f"abandoned: {one['abandoned']}"
            if one["abandoned"]
            else f"{one['devices']} devices, loss {one['loss']:.4f} {one['lost'] or ''}"
        )
        print(f"  round {one['number']}: {one['seconds']:.0f} s, {how}")
    for name, peak, budget in budgets:
        print(f"  {name}: worker {format_bytes(peak)} of {format_bytes(budget)}")
    for program, peak in peaks.items():
        print(f"  {program}: {format_bytes(peak)}, for seconds")


KILLED_ROUNDS, EPOCHS = 20, 4


class Fates:
    """Kills devices at drawn moments, and the leader between an average and its record; all come back."""

    def __init__(self, devices: list[Device]) -> None:
        self._devices, self._leader, self._numbers = devices, devices[0], random.Random(64)
        self.killed = dict.fromkeys((device.name for device in devices), 0)
        self.cut_between = 0
        """Kills of the leader when an average was written and not noted."""

    def strike(self) -> None:
        """Kill whom chance says, when it says, and turn it on again."""
        wait_until_drawn_moment(self._numbers, 10.0)
        victim = self._numbers.choice(self._devices)
        self._kill(victim)

    def cut(self) -> None:
        """Hold the leader's agent as soon as all replies of a round are there; its round's
        process goes on and averages.
        """
        folder = next((self._leader.root / "state/jobs").glob("*/leader"))
        process = self._leader.process
        assert process is not None
        done = self._done(folder)
        averaged = folder / global_file(done + 1)
        averaged.unlink(missing_ok=True)  # of a round that was cut before
        until(lambda: self._replies(folder) == len(self._devices) or self._done(folder) > done, patience_s=_SOME_S)
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(AssertionError):  # it had not been told of all replies when it was held
            until(averaged.exists, patience_s=3.0)
        self.cut_between += averaged.exists() and self._done(folder) == done
        self._kill(self._leader)

    def _kill(self, victim: Device) -> None:
        victim.kill()
        self.killed[victim.name] += 1
        wait_until_drawn_moment(self._numbers, 2.0)
        victim.start()

    def _replies(self, folder: Path) -> int:
        return len(list((folder / MESSAGES_FOLDER).glob("*.reply")))

    def _done(self, folder: Path) -> int:
        return int(json.loads((folder / "run.json").read_text())["done"])


def test_twenty_rounds_with_anybody_killed_at_any_moment_average_to_the_bit(tmp_path: Path) -> None:
    with network() as net:
        bridge = net.bridge()
        hosts = [net.host(bridge, f"10.84.0.{number}/24") for number in (1, 2, 3)]
        devices = [
            Device(tmp_path / name, (host.address, 9478), ["ip", "netns", "exec", host.namespace])
            for name, host in zip(("attic", "cellar", "shed"), hosts, strict=True)
        ]
        pair_all(devices)
        attic, fates = devices[0], Fates(devices)
        with running(devices):
            for part, device in enumerate(devices):
                device.submit(alike_bundle(tmp_path, part), epochs=EPOCHS)
            attic.lead(rounds=KILLED_ROUNDS, min_devices=3, timeout_s=_SOME_S, min_share=1.0)
            for number in range(KILLED_ROUNDS - 1):
                fates.cut() if number % 5 == 0 else fates.strike()
                until(partial(has_done, attic, number + 1), attic.federation, patience_s=_SOME_S)
            until(lambda: attic.federation()["state"] == "finished", attic.federation, patience_s=_SOME_S)
            found = attic.federation()
            results = []
            for device in devices:
                device.client.download(f"/v1/jobs/{JOB}/result", device.root / "out.safetensors")
                results.append(read_numpy(device.root / "out.safetensors"))
    print(
        f"{found['done']} rounds, {found['abandoned']} abandoned; killed {fates.killed}, {fates.cut_between} before "
        "the record"
    )
    nodes = [node_number(str(own_identity(device.root / "state").id)) for device in devices]
    by_hand = averaged_by_hand(KILLED_ROUNDS, sorted(range(3), key=nodes.__getitem__), EPOCHS)
    assert found["done"] == KILLED_ROUNDS and all(fates.killed.values()) and fates.cut_between
    assert all(one["devices"] == 3 for one in found["history"] if not one["abandoned"])
    for result in results:
        assert result.keys() == by_hand.keys()
        assert all(np.array_equal(result[name], by_hand[name]) for name in by_hand)


def test_a_cable_is_pulled_in_mid_round_and_put_back(tmp_path: Path) -> None:
    with network() as net:
        bridge = net.bridge()
        hosts = [net.host(bridge, f"10.83.0.{number}/24") for number in (1, 2, 3)]
        devices = [
            Device(tmp_path / name, (host.address, 9478), ["ip", "netns", "exec", host.namespace])
            for name, host in zip(("attic", "cellar", "shed"), hosts, strict=True)
        ]
        pair_all(devices)
        attic, cellar, _ = devices
        with running(devices):
            for part, device in enumerate(devices):
                device.submit(gestures_bundle(tmp_path, part), epochs=200)
            attic.lead(rounds=3, min_devices=2, timeout_s=120.0, min_share=0.6)
            until(lambda: in_round(attic, 1) and trains(cellar), attic.federation, patience_s=_SOME_S)
            net.unplug(hosts[1])
            until(lambda: attic.federation()["done"] >= 1, attic.federation, patience_s=_SOME_S)
            first = attic.federation()["history"][0]
            assert first["devices"] == 2 and first["lost"] == {"cellar": "no reply in time"}
            net.plug_in(hosts[1])
            until(lambda: attic.met() == 2, attic.federation, patience_s=_SOME_S)
            until(lambda: attic.federation()["state"] == "finished", attic.federation, patience_s=_SOME_S)
            found = attic.federation()
    for one in found["history"]:
        print(f"  round {one['number']}: {one['seconds']:.0f} s, {one['devices']} devices, {one['lost'] or 'all'}")
    assert found["done"] == 3
