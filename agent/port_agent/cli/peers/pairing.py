"""Commands about other devices: list, pair and unpair them."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from port_agent.cli.arguments import UsageError, duration, host_and_port
from port_agent.control import places
from port_agent.peers.pairing.code import LIFETIME_S, TRIES, read_code

if TYPE_CHECKING:
    from port_agent.control.client import ControlClient

_LONGEST_CODE_S = 3600.0
_JOIN_PATIENCE_S = 150.0
"""Seconds for generating a first key, and for the answer of a slow board on the other side."""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    peers = _command(
        commands, "peers", "show the devices that this one is paired with, and other agents on the network"
    )
    peers.set_defaults(run=_peers)
    pair = _command(commands, "pair", "pair with another device: show a code here, and type it there")
    pair.description = (
        "Pair two devices, so that each trusts the other. On one run `port-agent peer pair`, on the other `port-agent "
        "peer pair CODE` with the code that is shown, and with --at if multicast DNS does not find the first. A code "
        f"is valid for minutes and for {TRIES} tries."
    )
    pair.add_argument("code", nargs="?", metavar="CODE", help="code that the other device shows")
    pair.add_argument("--at", type=host_and_port, metavar="HOST[:PORT]", help="the device that shows the code")
    pair.add_argument(
        "--for",
        dest="lifetime_s",
        type=duration,
        metavar="TIME",
        help=f"how long the code is valid (default {LIFETIME_S / 60:.0f}min)",
    )
    pair.set_defaults(run=_pair)
    unpair = _command(commands, "unpair", "stop trusting a paired device immediately")
    unpair.add_argument("device", help="its name or id, as shown by `port-agent peer list`")
    unpair.set_defaults(run=_unpair)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the agent's control socket is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _peers(arguments: argparse.Namespace) -> int:
    answer = places.connect(arguments.runtime_dir).get("/v1/peers")
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        from port_agent.cli.daemon_views import show
        from port_agent.cli.peers.views import peers_screen

        show(peers_screen(answer))
    return 0


def _pair(arguments: argparse.Namespace) -> int:
    if arguments.code is not None:
        if arguments.lifetime_s is not None:
            raise UsageError("--for is for the device that shows the code; leave it out here")
        return _type_code(arguments)
    if arguments.at is not None:
        raise UsageError("--at goes with a code: port-agent peer pair CODE --at HOST")
    if arguments.lifetime_s is not None and arguments.lifetime_s > _LONGEST_CODE_S:
        raise UsageError(
            f"a code is valid for at most an hour, not {arguments.lifetime_s:.0f} s; give --for 1h or less"
        )
    client = places.connect(arguments.runtime_dir)
    code = client.post("/v1/pairing", lifetime_s=arguments.lifetime_s)
    if arguments.json:
        print(json.dumps(code), flush=True)
    else:
        print("\n".join(_code_lines(code)), flush=True)
    try:
        return _await_partner(client, arguments)
    except KeyboardInterrupt:
        client.post("/v1/pairing/stop")
        raise


def _code_lines(code: Mapping[str, Any]) -> list[str]:
    from port_agent.peers.interfaces import own_addresses

    place = "" if code["is_announced"] else f" --at {(own_addresses() or ['THIS-DEVICE'])[0]}"
    also = ", ".join(own_addresses())
    return [
        f"Pairing code: {code['code']}",
        f"On the other device, within {code['left_s'] / 60:.0f} minutes: port-agent peer pair {code['code']}{place}",
        f"(this device: {code['name']}, port {code['port']} of {also or 'no network'}; Ctrl-C ends it)",
    ]


def _await_partner(client: "ControlClient", arguments: argparse.Namespace) -> int:
    """Wait for the other device and print the outcome; return the exit code."""
    tries = disturber = None
    while True:
        outcome = client.get("/v1/pairing")
        if outcome["state"] != "shown":
            break
        if not arguments.json and outcome.get("tries_left") not in (None, tries):
            tries = outcome["tries_left"]
            print(f"A wrong code was typed; {tries} tries left.", flush=True)
        if not arguments.json and outcome.get("turned_away") not in (None, disturber):
            disturber = outcome["turned_away"]
            print(f"{disturber} keeps calling without pairing; the code stays valid.", flush=True)
    if arguments.json:
        print(json.dumps(outcome))
    elif outcome["state"] == "paired":
        print(f"Paired with {outcome['name']}. See it with: port-agent peer list")
    else:
        print(f"Not paired: {outcome.get('reason', 'the agent was restarted')}.")
    return 0 if outcome["state"] == "paired" else 1


def _type_code(arguments: argparse.Namespace) -> int:
    from port_agent.control.client import ControlClient

    read_code(arguments.code)  # rejects a typing error without the agent
    host, port = arguments.at or (None, None)
    path = places.connect(arguments.runtime_dir).path.parent
    client = ControlClient(path, timeout_s=_JOIN_PATIENCE_S)
    answer = client.post("/v1/pairing", code=arguments.code, host=host, port=port)
    print(
        json.dumps(answer)
        if arguments.json
        else f"Paired with {answer['name']} at {answer['address']}. See it with: port-agent peer list"
    )
    return 0


def _unpair(arguments: argparse.Namespace) -> int:
    answer = places.connect(arguments.runtime_dir).post("/v1/unpair", device=arguments.device)
    name = answer["name"]
    print(json.dumps(answer) if arguments.json else f"{name} is no longer trusted. Unpair this device there, too.")
    return 0
