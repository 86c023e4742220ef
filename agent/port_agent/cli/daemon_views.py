"""The daemon's answers as shown in a terminal."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from port_agent.cli.terminal import terminal
from port_planner.base.units import format_bytes, format_joules, format_seconds

_STATE_STYLE = {
    "training": "bold green",
    "starting": "green",
    "paused": "yellow",
    "leaving": "yellow",
    "waiting": "yellow",
    "idle": "dim",
}
_JOB_STYLE = {"running": "green", "finished": "green", "failed": "red", "backoff": "yellow", "cancelled": "dim"}
_SEVERITY = {"error": ("✗", "red"), "warning": ("!", "yellow"), "info": ("·", "dim")}
_TB = 1e12
_PEERS_SHOWN = 5
_UNWRAPPED_COLUMNS = 400
"""Width in columns at which nothing is wrapped: more than an entry of the timeline needs."""
_VERDICT = {"good": ("✓", "green"), "note": ("·", "yellow"), "bad": ("✗", "red")}


def show(renderable: RenderableType) -> None:
    """Print to the terminal."""
    terminal().print(renderable)


def watch(fetch: Callable[[], Mapping[str, Any]]) -> int:
    """Show the status once a second until interrupted.

    In a file or a pipe, one screen follows another.
    """
    console = terminal()
    if not console.is_terminal:
        while True:
            console.print(Text(datetime.now().strftime("%H:%M:%S")), status_screen(fetch()), sep="\n")
            console.file.flush()
            time.sleep(1.0)
    with Live(status_screen(fetch()), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(status_screen(fetch()), refresh=True)


def status_screen(status: Mapping[str, Any]) -> Group:
    """Return the whole status: state, reasons, job, device, energy and health."""
    parts: list[RenderableType] = [_headline(status)]
    for run in status["running"]:
        parts += [Text(), *_current_job(run, status)]
    if status["waiting"]:
        parts += [Text(), jobs_table(status["waiting"][:6], title="Waiting")]
        if len(status["waiting"]) > 6:
            parts.append(Text(f"  and {len(status['waiting']) - 6} more; port-agent job list", style="dim"))
    parts += [Text(), _device(status)]
    if status["health"]:
        parts += [Text(), *_health(status["health"])]
    return Group(*parts)


def show_timeline(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print the agent's states. In a file or a pipe, which people search by line, each state stays on one line."""
    console = terminal()
    if not console.is_terminal:
        console.width = _UNWRAPPED_COLUMNS
    console.print(timeline_table(entries))


def timeline_table(entries: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of the agent's states, one line for each change."""
    if not entries:
        return Text("No records for this time.", style="dim")
    table = Table.grid(padding=(0, 2))
    for entry in entries:
        moment = datetime.fromtimestamp(entry["at"])
        table.add_row(_label(f"{moment:%a %d %b %H:%M}"), Text(entry["text"]))
    return table


def _headline(status: Mapping[str, Any]) -> Text:
    state = status["state"]
    line = Text()
    line.append(state, style=_STATE_STYLE.get(state, ""))
    line.append(": " + "; ".join(status["reasons"]))
    return line


def _whose(job: Mapping[str, Any]) -> str:
    """Return the job's relation to its owner: a fine-tuning that the daemon started, or an attached program."""
    return f"fine-tuning of {job['owner']}" if job["kind"] == "finetune" else f"program of {job['owner']}"


def _current_job(job: Mapping[str, Any], status: Mapping[str, Any]) -> Iterable[RenderableType]:
    table = Table.grid(padding=(0, 2))
    total = job["total_steps"]
    whose = f", {_whose(job)}, process {job['pid']}" if job["owner"] else ""
    table.add_row(_label("Job"), f"{job['id']} ({job['name']}){whose}")
    if total:
        bar = Table.grid(padding=(0, 1))
        share = min(1.0, job["step"] / total)
        bar.add_row(ProgressBar(total=1.0, completed=share, width=30), f"{share:.0%}  step {job['step']} of {total}")
        table.add_row(_label("Progress"), bar)
    else:
        table.add_row(_label("Progress"), f"step {job['step']}")
    pace = []
    if job["loss"] is not None:
        pace.append(f"loss {job['loss']:.4g}")
    if job["step_s"] is not None:
        pace.append(f"{format_seconds(job['step_s'])} per step")
    if job["eta_s"] is not None:
        pace.append(f"{format_seconds(job['eta_s'])} of training left")
    if job["deadline_at"] is not None:
        pace.append(f"due {_moment(job['deadline_at'])}")
    if pace:
        table.add_row(_label(""), ", ".join(pace))
    memory = []
    if job["owner"]:
        memory.append(f"{format_bytes(job['planned_peak_bytes'] or 0)} at most")
    elif job["plan"] is not None:
        memory.append(
            f"plan {job['plan'] + 1} of {job['plans']}, {format_bytes(job['planned_peak_bytes'] or 0)} planned"
        )
    if job["memory_limit_bytes"] is not None:
        memory.append(f"limit {format_bytes(job['memory_limit_bytes'])}")
    if job["peak_rss_bytes"]:
        memory.append(f"peak {format_bytes(job['peak_rss_bytes'])}")
    if job["planned_device_bytes"]:
        memory.append(f"on the device {format_bytes(job['planned_device_bytes'])} planned")
    if job["device_peak_bytes"]:
        memory.append(f"on the device peak {format_bytes(job['device_peak_bytes'])}")
    if memory:
        table.add_row(_label("Memory"), ", ".join(memory))
    if job["waits_for"]:
        table.add_row(_label("Waits for"), Text(job["waits_for"]))
    table.add_row(_label("Energy"), _energy(job, status["energy"]))
    return [table]


def _energy(job: Mapping[str, Any], energy: Mapping[str, Any] | None) -> str:
    parts = []
    if energy and energy.get("job") == str(job["id"]) and energy.get("job_net_joules") is not None:
        how = ", ".join(dict.fromkeys((str(energy["kind"]), str(energy["source"]))))
        parts.append(f"{format_joules(energy['job_net_joules'])} used by this job ({how})")
    if energy and energy.get("watts") is not None:
        parts.append(f"{energy['watts']:.1f} W now")
    if job["planned_joules"] is not None:
        parts.append(f"{format_joules(job['planned_joules'])} as planned so far")
    return ", ".join(parts) or "unknown"


def flash_life_line(life: Mapping[str, Any], running: Iterable[Mapping[str, Any]]) -> str:
    """Return how long the medium lasts, in years at today's rate and in steps of the running jobs."""
    how = "assumed to endure" if life["assumed"] else "which endures"
    used = "" if life["used_share"] is None else f", {life['used_share']:.0%} of its life used by its own count"
    lasts = [] if life["years_left"] is None else [f"{life['years_left']:,.2g} years at today's rate"]
    lasts += [
        f"{life['left_bytes'] / run['step_written_bytes']:,.2g} steps of job {run['id']}"
        for run in running
        if run["step_written_bytes"]
    ]
    text = f"this {life['medium']}, {how} {life['endurance_bytes'] / _TB:,.3g} TB{used}"
    return f"{text}, lasts {', '.join(lasts)}" if lasts else text


def _device(status: Mapping[str, Any]) -> Table:
    facts = status["facts"]
    table = Table.grid(padding=(0, 2))
    battery = "" if facts["battery_percent"] is None else f", battery {facts['battery_percent']:.0f} %"
    table.add_row(_label("Power"), f"{facts['power']}{battery}")
    unread = any(item["code"] == "sensor" and item["key"].startswith("temperature") for item in status["health"])
    none = "cannot be read" if unread else "no sensor"
    heat = none if facts["temperature_c"] is None else f"{facts['temperature_c']:.0f} °C"
    throttled = ", throttled" if facts["throttled"] == "yes" else ""
    table.add_row(_label("Heat"), heat + throttled)
    voices = ", ".join(f"{voice['name']} {_voice(voice['idle'])}" for voice in facts["voices"])
    table.add_row(_label("In use?"), voices or "unknown")
    free = []
    if facts["available_memory_bytes"] is not None:
        free.append(f"{format_bytes(facts['available_memory_bytes'])} memory")
    if facts["free_disk_bytes"] is not None:
        free.append(f"{format_bytes(facts['free_disk_bytes'])} disk")
    table.add_row(_label("Free"), ", ".join(free) or "unknown")
    written, budget = status["flash_written_today_bytes"], status["flash_budget_bytes"]
    table.add_row(_label("Flash"), f"{format_bytes(written)} of {format_bytes(budget)} written today")
    if status["flash_life"] is not None:
        table.add_row(_label(""), flash_life_line(status["flash_life"], status["running"]))
    for board in status["mcus"]:
        table.add_row(_label("Board"), f"{board['name']}, {board['port']}")
    if status["paired"]:
        table.add_row(_label("Paired"), Text(_paired_line(status["paired"])))
    if status["peers"] is not None:
        table.add_row(_label("Peers"), Text(_peers_line(status["peers"])))
    table.add_row(_label("Sleep"), Text(status["sleep"]))
    if status["usual_day_s"] is not None:
        table.add_row(_label("Usual"), f"{format_seconds(status['usual_day_s'])} of training on an average day")
    if status["next_window"] is not None:
        table.add_row(_label("Window"), f"opens {_moment(status['next_window'])}")
    return table


def _voice(idle: str) -> str:
    return {"yes": "no", "no": "yes", "unknown": "unknown"}[idle]


def _health(items: Iterable[Mapping[str, Any]]) -> Iterable[RenderableType]:
    for item in items:
        mark, style = _SEVERITY[item["severity"]]
        yield Text.assemble((f"{mark} {item['title']}: ", style), item["text"])
        if item["remedy"]:
            yield Padding(Text(item["remedy"], style="dim"), (0, 0, 0, 2))


def jobs_table(jobs: Iterable[Mapping[str, Any]], title: str | None = None) -> RenderableType:
    """Return jobs as a table, one line each."""
    jobs = list(jobs)
    if not jobs:
        return Text("no jobs; add one with `port-agent job submit job.port`", style="dim")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("Job", "Name", "State", "Step", "Loss", "Why"):
        table.add_column(name, justify="right" if name in ("Job", "Step", "Loss") else "left", no_wrap=name != "Why")
    for job in jobs:
        total = f"/{job['total_steps']}" if job["total_steps"] else ""
        loss = "" if job["loss"] is None else f"{job['loss']:.4g}"
        state = job["state"].replace("_", " ")
        table.add_row(
            str(job["id"]),
            job["name"],
            Text(state, style=_JOB_STYLE.get(job["state"], "")),
            f"{job['step']}{total}" if job["step"] or total else "",
            loss,
            _why(job),
        )
    return table


def _why(job: Mapping[str, Any]) -> str:
    parts = [job["reason"]] if job["reason"] not in ("", job["state"]) else []
    if job["retry_in_s"] is not None:
        parts.append(f"retries in {format_seconds(round(job['retry_in_s']))}")
    if job["owner"]:
        parts.append(_whose(job))
    if job["on"]:
        parts.insert(0, f"on {job['on']}")
    if job["guest_of"]:
        parts.append(f"of {job['guest_of']}")
    if job["priority"]:
        parts.append(f"priority {job['priority']}")
    if job["deadline_at"] is not None:
        parts.append(f"due {_moment(job['deadline_at'])}")
    return "; ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def job_screen(job: Mapping[str, Any]) -> Group:
    """Return everything about one job."""
    table = Table.grid(padding=(0, 2))
    table.add_row(_label("Job"), f"{job['id']} ({job['name']}), {job['state'].replace('_', ' ')}")
    for label, text in (
        ("Why", _why(job)),
        ("Submitted", _moment(job["submitted_at"])),
        ("Progress", _progress(job)),
        (
            "Trained",
            f"{format_seconds(job['trained_s'])} in {_counted(job['attempts'], 'run')}" if job["attempts"] else "",
        ),
        ("Energy", _job_energy(job)),
        ("Federation", membership_line(job["federation"]) if job.get("federation") else ""),
        ("Result", job["result"] or ""),
        ("Inbox", job["inbox"] or ""),
        ("Files", job["directory"]),
    ):
        if text:
            table.add_row(_label(label), text)
    history = Table.grid(padding=(0, 2))
    for entry in job["history"]:
        history.add_row(Text(_moment(entry["at"], seconds=True), style="dim"), entry["kind"], entry["text"])
    parts: list[RenderableType] = [table, Text(), history]
    if job["promise"] is not None:
        parts[1:1] = [Text(), _promise(job)]
    return Group(*parts)


def membership_line(membership: Mapping[str, Any]) -> str:
    """Return who leads the rounds of a job, and what the job waits for, in words."""
    where = "" if membership["round"] is None else f", round {membership['round']}"
    return f"{membership['leader']} leads{where}; waiting: {membership['waits']}"


def _job_energy(job: Mapping[str, Any]) -> str:
    """Return the energy used, as far as it was metered, and what plans predicted for the same steps."""
    used, planned = job["metered_joules"], job["planned_joules"]
    parts = [] if used is None else [f"{format_joules(used)} used since the agent started"]
    parts += [f"{format_joules(planned)} planned so far"] if planned else []
    return ", ".join(parts)


def _promise(job: Mapping[str, Any]) -> Table:
    """Return what was promised when the job was submitted, beside what has happened since."""
    promised, steps = job["promise"], job["step"]
    table = Table("", "promised", "so far" if job["finished_at"] is None else "happened", show_edge=False)
    peak = job["measured"]["peak_rss_bytes"]
    table.add_row("memory", format_bytes(promised["peak_bytes"]), format_bytes(peak) if peak else "")
    table.add_row(
        "time a step", format_seconds(promised["step_s"]), format_seconds(job["trained_s"] / steps) if steps else ""
    )
    metered = job["metered_step_joules"]
    table.add_row("energy a step", format_joules(promised["step_joules"]), format_joules(metered) if metered else "")
    written = f"{format_bytes(job['written_bytes'] // steps)}, checkpoints included" if steps else ""
    table.add_row("written a step", format_bytes(promised["written_bytes"]), written)
    done = _moment(job["finished_at"]) if job["finished_at"] is not None else _progress(job)
    table.add_row("done", promised_end(promised), done)
    return table


def promise_lines(job: Mapping[str, Any]) -> list[str]:
    """Return the promises made for a job that was just submitted."""
    promise = job["promise"]
    if promise is None:
        return []
    written = f"{format_bytes(promise['written_bytes'])} written to flash"
    if promise["steps"] is not None and promise["written_bytes"]:
        written += f" ({promise['written_bytes'] * promise['steps'] / 1e12:.3g} TB in total)"
    return [
        f"It fits in {format_bytes(promise['peak_bytes'])}. A step: {format_seconds(promise['step_s'])}, "
        f"{format_joules(promise['step_joules'])}, {written}.",
        f"Done: {promised_end(promise)}.",
    ]


def _progress(job: Mapping[str, Any]) -> str:
    return f"step {job['step']}" + (f" of {job['total_steps']}" if job["total_steps"] else "")


def promised_end(promise: Mapping[str, Any]) -> str:
    """Return when a job should be done, in nights of this device, or why that is unknown."""
    if promise["ends_at"] is not None:
        return f"{_moment(promise['ends_at'])}, {_counted(promise['nights'], 'night')} of training"
    if promise["steps"] is None:
        return "unknown: it depends on the data that arrives"
    training = f"{format_seconds(promise['steps'] * promise['step_s'])} of training"
    return f"{training}; the number of nights is known once the agent has watched this device for a day"


def _paired_line(devices: list[Mapping[str, Any]]) -> str:
    words = [f"{device['name']} {device['state'] if device['is_connected'] else 'offline'}" for device in devices]
    return ", ".join(words[:_PEERS_SHOWN]) + (
        f" and {len(words) - _PEERS_SHOWN} more" if len(words) > _PEERS_SHOWN else ""
    )


def _peers_line(peers: list[Mapping[str, Any]]) -> str:
    if not peers:
        return "none seen"
    shown = ", ".join(f"{peer['name']} {peer['state']}" for peer in peers[:_PEERS_SHOWN])
    return (
        shown if len(peers) <= _PEERS_SHOWN else f"{shown} and {len(peers) - _PEERS_SHOWN} more; port-agent peer list"
    )


def doctor_screen(answer: Mapping[str, Any]) -> Group:
    """Return the findings, each bad one with its remedy."""
    parts: list[RenderableType] = []
    for check in answer["checks"]:
        mark, style = _VERDICT[check["verdict"]]
        parts.append(Text.assemble((f"{mark} ", style), (f"{check['name']}: ", "bold"), check["finding"]))
        if check["cure"]:
            parts.append(Padding(Text(check["cure"], style="dim"), (0, 0, 0, 2)))
    if answer["health"]:
        parts += [Text(), Text("The running agent reports:", style="bold"), *_health(answer["health"])]
    bad = sum(check["verdict"] == "bad" for check in answer["checks"])
    summary = "everything needed works" if not bad else f"{bad} of {len(answer['checks'])} checks need attention"
    return Group(*parts, Text(), Text(summary, style="green" if not bad else "red"))


def _label(text: str) -> Text:
    return Text(text, style="dim")


def _moment(at: float, *, seconds: bool = False) -> str:
    moment = datetime.fromtimestamp(at)
    today = moment.date() == datetime.now().date()
    clock = moment.strftime("%H:%M:%S" if seconds else "%H:%M")
    return clock if today else f"{moment:%a %d %b} {clock}"
