"""A supervisor for one round: starts its real process, and answers what it sends with the
real client, in this process.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from port_agent.federate.client import answer_message
from port_agent.federate.orders import (
    FOLDER,
    LEADER_FOLDER,
    MESSAGE_FILE,
    MESSAGES_FOLDER,
    MODEL_FILE,
    REPLY_FILE,
    RESULT_FILE,
    START_FILE,
    ClientOrder,
    RoundOrder,
    global_file,
)
from port_agent.federate.tensors import Arrays, FederatedTensors, federated_tensors
from port_agent.jobs.job import FederationTerms
from port_agent.peers.federation_requests import node_number
from port_agent.peers.fleet.paired import PairedDevices
from port_agent.peers.identity.keys import FILE_NAME, Identity, read_identity
from tests.agent.live_daemon import ROOT
from tests.agent.peers.devices import as_paired, identity


def trust(state_dir: Path, other: Identity) -> None:
    """Have a device be paired with another."""
    known = PairedDevices(state_dir)
    known.load()
    known.add(as_paired(other, other.file.parent.name))


def client_order(folder: Path, bundle: Path, terms: FederationTerms, state_dir: Path) -> ClientOrder:
    """Return what a supervisor tells the client of a job that trains on its bundle's samples."""
    tensors = federated_tensors(bundle)
    return ClientOrder(str(folder), str(bundle), str(state_dir), tensors.data, tensors.samples, terms)


@dataclass
class Member:
    """A device: what training adds to its weights, and what becomes of a reply on its way."""

    folder: Path
    bundle: Path
    step: float
    spoil: Callable[[bytes], bytes | None] = field(default=lambda reply: reply)
    """None: it says nothing any more."""
    brought: Callable[[bytes], bytes] = field(default=lambda message: message)
    """What its leader makes of a message to it."""
    messages: int = 0
    changed: Callable[[Arrays], Arrays] | None = None
    """None: it adds `step`."""
    terms: FederationTerms = field(default_factory=FederationTerms)

    @property
    def state_dir(self) -> Path:
        """Where its key lies, and whom it is paired with."""
        return self.folder.parent

    @property
    def tensors(self) -> FederatedTensors:
        return federated_tensors(self.bundle)

    def change(self, arrays: Arrays) -> Arrays:
        """Return what training makes of weights."""
        if self.changed is not None:
            return self.changed(arrays)
        return {name: np.add(array, np.float32(self.step)) for name, array in arrays.items()}

    def reply(self, message: bytes) -> bytes | None:
        """Return the reply to a message, as a device makes it."""
        self.messages, message = self.messages + 1, self.brought(message)
        for name in (REPLY_FILE, START_FILE, RESULT_FILE):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / MESSAGE_FILE).write_bytes(message)
        order = client_order(self.folder, self.bundle, self.terms, self.state_dir)
        if answer_message(order).trains_first:
            assert not (self.folder / REPLY_FILE).exists()
            trained = self.change(self.tensors.read(self.folder / START_FILE))
            self.tensors.write(self.folder / RESULT_FILE, trained)
            (self.folder / RESULT_FILE).with_suffix(".loss").write_text("0.25")
            assert not answer_message(order).trains_first
        return self.spoil((self.folder / REPLY_FILE).read_bytes())

    def told(self) -> Arrays:
        """Return the averaged weights that it has."""
        return self.tensors.read(self.folder / MODEL_FILE)


class Led:
    """A federation without network."""

    def __init__(self, root: Path, bundles: list[Path]) -> None:
        self.root = root / LEADER_FOLDER
        (self.root / MESSAGES_FOLDER).mkdir(parents=True)
        self.bundle = bundles[0]
        self.number = 1
        """Of the last round."""
        self.members: dict[int, Member] = {}
        for bundle in bundles:
            self.add(bundle)

    def add(self, bundle: Path) -> None:
        """Have another device take part, paired with those before it."""
        number = len(self.members)
        folder = self.root.parent / f"member{number}" / FOLDER
        folder.mkdir(parents=True)
        own = identity(folder.parent)
        added = Member(folder, bundle, step=float(number + 1))
        for other in self.members.values():
            trust(added.state_dir, read_identity(other.state_dir / FILE_NAME))
            trust(other.state_dir, own)
        self.members[node_number(str(own.id))] = added

    def node(self, number: int) -> int:
        """Return the node of the member that was added as this one, from 0."""
        return list(self.members)[number]

    def member(self, number: int) -> Member:
        """Return it."""
        return self.members[self.node(number)]

    def round(self, **changes: Any) -> dict[str, Any]:
        """Do a round; returns how its process says it ended."""
        names = {node: member.folder.parent.name for node, member in self.members.items()}
        values: dict[str, Any] = {
            "run_id": 7,
            "number": 1,
            "folder": str(self.root),
            "bundle": str(self.bundle),
            "names": names,
            "goal": len(names),
            "timeout_s": 60.0,
            "min_share": 0.5,
        }
        order = RoundOrder(**{**values, **changes})
        self.number = self.number if order.final else order.number
        command = [sys.executable, "-m", "port_agent.federate.round"]
        ended: dict[str, Any] = {}
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        ) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            say = process.stdin
            say.write(msgspec.json.encode(msgspec.to_builtins(order, str_keys=True)) + b"\n")
            say.flush()
            for line in process.stdout:
                message = json.loads(line)
                if message["event"] == "send":
                    brought = json.dumps(self._brought(message["file"], message["node"])).encode()
                    with contextlib.suppress(BrokenPipeError):  # it had enough
                        say.write(brought + b"\n")
                        say.flush()
                elif message["event"] == "ended":
                    ended = message
            assert ended, process.stderr.read().decode()[-2000:]
        return ended

    def _brought(self, file: str, node: int) -> dict[str, Any]:
        path = self.root / MESSAGES_FOLDER / file
        reply = self.members[node].reply(path.read_bytes())
        if reply is None:
            return {"node": node, "file": "none"}
        path.with_name(f"{file}.reply").write_bytes(reply)
        return {"node": node, "file": file, "reply": str(path.with_name(f"{file}.reply"))}

    def averaged(self) -> Arrays:
        """Return the weights that the leader has."""
        return federated_tensors(self.bundle).read(self.root / global_file(self.number))
