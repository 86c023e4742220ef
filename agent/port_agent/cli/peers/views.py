"""Views of other devices in a terminal. Their texts are shown unchanged, without markup."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from port_agent.cli.daemon_views import membership_line
from port_planner.base.units import format_joules, format_seconds

_CHARGING = {True: "yes", False: "on battery", None: "?"}


def peers_screen(answer: Mapping[str, Any]) -> RenderableType:
    """Return this device and the paired ones, the rounds in progress, other agents on the network, and the latest
    events.
    """
    parts: list[RenderableType] = []
    if answer["paired"]:
        name = f"{answer['own']['name']} (this device)"
        own = {**answer["own"], "name": name, "is_connected": True, "last_heard_s": 0, "trouble": ""}
        everybody = [own, *answer["paired"]]
        parts += [_paired_table(everybody), *_troubles(answer["paired"]), Text(_total(everybody), style="dim"), Text()]
    rounds = [_federation_line(one) for one in answer["federations"]]
    rounds += [f"{one['name']}: {membership_line(one)}" for one in answer["memberships"]]
    if rounds:
        parts += [*map(Text, rounds), Text()]
    parts += _seen(answer)
    parts += _own(answer)
    parts += [
        Text(f"{datetime.fromtimestamp(entry['at']):%d %b %H:%M} {entry['text']}", style="dim")
        for entry in answer["history"]
    ]
    return Group(*parts)


def _federation_line(led: Mapping[str, Any]) -> str:
    """Return the state of a federation that this device leads, in words."""
    loss = "" if led["loss"] is None else f", loss {led['loss']:.4f}"
    awaited = "; ".join(f"waiting for {name}: {what}" for name, what in sorted(led["awaited"].items()))
    begun = f"round {led['done'] + 1} on {', '.join(led['training'])}"
    now = "; ".join(filter(None, [begun, awaited])) if led["training"] else f"waiting: {led['waits']}"
    return f"{led['name']}: this device leads, {led['done']} of {led['rounds']} rounds{loss}; {now}"


def _total(devices: list[Mapping[str, Any]]) -> str:
    """Return the total energy of all devices' days in words, marked as estimated if one part is."""
    metered = [device for device in devices if device["today_joules"] is not None]
    if not metered:
        return "no device meters its energy"
    estimated = "" if all(device["is_measured"] for device in metered) else " (~: estimated)"
    total = format_joules(sum(device["today_joules"] for device in metered))
    return f"energy today of {len(metered)} of {len(devices)} devices: {total}{estimated}"


def _paired_table(devices: list[Mapping[str, Any]]) -> Table:
    table = _table("Paired", "Board", "Charging", "State", "Job", "Energy today", "Last seen", "Id")
    for device in devices:
        state = device["state"] if device["is_connected"] else "offline"
        style = "" if device["is_connected"] else "dim"
        words = (
            device["name"],
            device["board"],
            _CHARGING[device["charging"]],
            state,
            _job(device),
            _energy(device),
            _last_heartbeat(device),
            device["id"].partition("-")[0],
        )
        table.add_row(*(Text(word, style=style) for word in words))
    return table


def _job(device: Mapping[str, Any]) -> str:
    if not device["job"]:
        return ""
    progress = "" if device["progress"] is None else f" {100 * device['progress']:.0f} %"
    return f"{device['job']}{progress}"


def _energy(device: Mapping[str, Any]) -> str:
    if device["today_joules"] is None:
        return ""
    return f"{'' if device['is_measured'] else '~'}{format_joules(device['today_joules'])}"


def _last_heartbeat(device: Mapping[str, Any]) -> str:
    if device["last_heard_s"] is None:
        return "never since the start"
    return f"{format_seconds(device['last_heard_s'])} ago" if device["last_heard_s"] else "now"


def _troubles(devices: list[Mapping[str, Any]]) -> list[Text]:
    """Return why devices are offline, a line for each whose reason is known."""
    return [Text(f"{device['name']} is not reached: {device['trouble']}") for device in devices if device["trouble"]]


def _seen(answer: Mapping[str, Any]) -> list[RenderableType]:
    if not answer["discover"]:
        return [Text("discovery is off; set discover = true under [peers] in config.toml and run port-agent reload")]
    paired = {device["short"] for device in answer["paired"]}
    others = [peer for peer in answer["peers"] if peer["id"] not in paired]
    if not others:
        return [Text("no other agent seen" if not answer["peers"] else "no agents seen besides the paired ones")]
    table = _table("Name", "Board", "State", "Version", "Address", "Last seen", "Id")
    for peer in others:
        seen = f"{format_seconds(peer['last_seen_s'])} ago" if peer["last_seen_s"] else "now"
        words = (peer["name"], peer["board"], peer["state"], peer["version"], peer["address"] or "", seen, peer["id"])
        table.add_row(*(Text(word) for word in words))
    return [Text("Seen on the network, not paired; these names are unverified", style="dim"), table]


def _own(answer: Mapping[str, Any]) -> list[RenderableType]:
    lines = []
    if answer["discover"]:
        where = (
            f"on {', '.join(answer['interfaces'])}" if answer["interfaces"] else "nowhere: no network interface is up"
        )
        lines.append(f"this device: {answer['name']} ({answer['id']}), announced {where}")
    if answer["device_id"]:
        lines.append(f"its id: {answer['device_id']}")
    if answer["port"]:
        lines.append(f"paired devices call at port {answer['port']}")
    if answer["shares"]:
        lines.append("paired devices may read its costs and plans")
    if answer["solves"]:
        lines.append("paired devices may have it solve their plans")
    if answer["takes_jobs"]:
        lines.append("paired devices may have it train their jobs")
    if answer["introduces"]:
        lines.append("introduces paired devices to each other if they chose it as introducer")
    if answer["introducer"]:
        count = sum(device["introduced_by"] is not None for device in answer["paired"])
        received = f"; currently unreachable: {answer['introducer_trouble']}" if answer["introducer_trouble"] else ""
        lines.append(f"{answer['introducer']} introduces others to this device: {count} so far{received}")
    return [Text(line, style="dim") for line in lines]


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column)
    return table
