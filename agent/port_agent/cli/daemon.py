"""Commands of the daemon: run it, give it jobs, show its state."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from port_agent.cli.absent import absent
from port_agent.cli.arguments import (
    UsageError,
    add_federation_terms,
    deadline,
    deadline_or_none,
    federation_terms,
    pause_duration,
    readable_file,
    readable_file_or_folder,
    readable_folder,
    rounds_led,
    since,
    whole_number,
    writable_file,
    writable_folder,
)
from port_agent.control import places
from port_planner.base.units import shown

if TYPE_CHECKING:
    from port_agent.control.client import ControlClient, ControlError

Arguments = argparse.Namespace
_NOT_NOW_S = 2 * 3600.0
_DOCTOR_PATIENCE_S = 600.0
"""Seconds to wait for the doctor: twice what it needs on a slow board for torch, a GPU, flash and sensors."""
_MAX_BOARDS = 64
"""Largest number of simulated boards of one job; each is a process."""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    _add_run(commands)
    _add_submit(commands)
    status = _client(commands, "status", "show what the agent is doing, and why", _status)
    status.add_argument("--watch", action="store_true", help="refresh once a second")
    why = _client(commands, "why", "show when the agent trained, when it did not, and why", _why)
    why.add_argument(
        "--since", type=since, metavar="WHEN", help='"yesterday", "8h", "22:00" or "2026-11-01" (default: a day ago)'
    )
    jobs = _client(commands, "jobs", "list jobs", _jobs)
    jobs.add_argument("--all", action="store_true", help="also show all finished jobs")
    _add_job(_client(commands, "job", "show one job with its history", _job))
    logs = _client(commands, "logs", "show the log of a job", _logs, has_json=False)
    _add_job(logs)
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing new lines until the job ends")
    logs.add_argument(
        "-n", "--lines", type=whole_number(1), default=200, help="how many of the last lines (default 200)"
    )
    result = _client(commands, "result", "fetch the trained weights of a job", _result)
    _add_job(result)
    result.add_argument(
        "-o", "--output", type=writable_file, required=True, metavar="FILE", help="file to write (safetensors)"
    )
    feed = _client(commands, "feed", "give files to a job that waits for data", _feed)
    _add_job(feed)
    feed.add_argument("files", nargs="+", type=readable_file, metavar="FILE", help="file to copy into its inbox")
    _add_control(commands)
    doctor = _client(commands, "doctor", "examine sensors, permissions, flash, cgroups and clock", _doctor)
    doctor.add_argument("--state-dir", type=readable_folder, help="state directory to examine when no agent is running")
    doctor.add_argument("--no-flash", action="store_true", help="skip the flash speed test (writes 16 MB)")
    completion = commands.add_parser("completion", help="print a shell completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell that will load it")
    completion.set_defaults(run=_completion)


# --- the parsers


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="run the agent itself (systemd does this for you)")
    run.add_argument("--foreground", action="store_true", help="stay in the foreground (it always does; for clarity)")
    run.add_argument("--state-dir", type=writable_folder, metavar="DIR", help="directory of jobs and checkpoints")
    run.add_argument("--runtime-dir", type=writable_folder, metavar="DIR", help="directory of the control socket")
    run.add_argument(
        "--config",
        type=readable_file,
        metavar="FILE",
        help=f"configuration (default: {places.SYSTEM_CONFIG} if it exists)",
    )
    run.add_argument(
        "--sysfs-root", type=readable_folder, metavar="DIR", help="read power and temperature below DIR instead of /sys"
    )
    run.set_defaults(run=_run)


def _add_submit(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    submit = _client(commands, "submit", "give the agent a job", _submit)
    submit.epilog = "To fine-tune a language model on your own text, use `port-agent finetune ... --submit`."
    submit.add_argument(
        "bundle",
        nargs="?",
        type=readable_file_or_folder,
        metavar="JOB",
        help="a bundle made by `port-agent plan`; with --kind mcu a model directory made by `port-agent mcu compile`",
    )
    submit.add_argument("--name", help="name of the job (default: the bundle's file name)")
    submit.add_argument(
        "--kind",
        choices=("train", "mcu"),
        default="train",
        help="train: on this machine (default); mcu: on a microcontroller on a serial port",
    )
    submit.add_argument("--data", type=readable_folder, metavar="DIR", help="directory of data that the agent can read")
    submit.add_argument("--inbox", action="store_true", help="train on files as they arrive in the job's inbox")
    submit.add_argument(
        "--federated",
        action="store_true",
        help="train a round when the device that leads a federation of this name asks (`port-agent peer federate`)",
    )
    add_federation_terms(submit)
    submit.add_argument(
        "--movable",
        nargs="?",
        const="soonest",
        choices=("soonest", "cheapest"),
        default="never",
        help="a paired device that takes jobs (take_jobs = true under [peers] there) may train it and receives its "
        "bundle, checkpoint and data: the one that finishes soonest (default with --movable) or uses the fewest "
        "joules; without this option the job never leaves this device",
    )
    submit.add_argument("--epochs", type=whole_number(1), help="passes over the data (default 1)")
    submit.add_argument("--steps", type=whole_number(1), help="train this number of batches instead of epochs")
    submit.add_argument(
        "--checkpoint-every",
        type=whole_number(1),
        metavar="STEPS",
        help="steps between checkpoints (default: chosen by cost and flash wear)",
    )
    submit.add_argument(
        "--page-dir",
        type=writable_folder,
        action="append",
        default=[],
        dest="page_dirs",
        metavar="DIR",
        help="where temporaries are paged (default: the agent's state directory); repeat it for each further medium "
        "that the bundle was planned for, in the same order",
    )
    submit.add_argument("--priority", type=whole_number(-100, 100), default=0, help="-100 to 100, higher goes first")
    submit.add_argument("--deadline", type=deadline, metavar="WHEN", help='"8h", "3d", "07:00" or "2026-12-24 18:00"')
    _add_board_options(submit)


def _add_board_options(submit: argparse.ArgumentParser) -> None:
    board = submit.add_argument_group(
        "microcontroller jobs",
        "Example: port-agent job submit build/ --kind mcu --data recordings/ --epochs 3. The board must hold the "
        "model's firmware (port-agent mcu flash); while it is unplugged, the job waits.",
    )
    board.add_argument("--port", help="serial port of the board (default: the only known board plugged in)")
    board.add_argument("--serial", help="USB serial number of the board, which finds it on any port")
    board.add_argument("--simulate", action="store_true", help="run the firmware in QEMU instead of on a board")
    board.add_argument("--board", help="board that --simulate imitates (default qemu-m4f)")
    board.add_argument(
        "--boards",
        metavar="all|BOARD,...",
        help="divide the samples among several boards, named by serial port or USB serial number, or all that are "
        "plugged in (with --simulate: how many); one job per board, named NAME.1-of-N and so on, and each sample is "
        "trained by exactly one of them",
    )


def _add_control(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    pause = _client(commands, "pause", "pause a job, or everything", _pause)
    pause.add_argument("job", nargs="?", help="number or name (default: everything)")
    pause.add_argument(
        "--for", dest="for_s", type=pause_duration, metavar="TIME", help='pause everything for a time such as "2h"'
    )
    resume = _client(commands, "resume", "resume a job, or everything", _resume)
    resume.add_argument("job", nargs="?", help="number or name (default: everything)")
    now = _client(
        commands,
        "run-now",
        "train a job before all others, even while the device is in use or outside the time windows",
        _run_now,
    )
    _add_job(now)
    now.add_argument(
        "--for",
        dest="for_s",
        type=pause_duration,
        metavar="TIME",
        help='how long, such as "2h" (default: until the job ends)',
    )
    not_now = _client(commands, "not-now", "train nothing for a while", _not_now)
    not_now.add_argument(
        "--for", dest="for_s", type=pause_duration, metavar="TIME", default=_NOT_NOW_S, help="how long (default 2h)"
    )
    _add_job(_client(commands, "cancel", "end a job for good", _cancel))
    priority = _client(commands, "priority", "change the priority of a job", _priority)
    _add_job(priority)
    priority.add_argument("value", type=whole_number(-100, 100), help="-100 to 100, higher goes first")
    recall = _client(commands, "recall", "take a job back from the paired device that it moved to", _recall)
    _add_job(recall)
    recall.add_argument(
        "--force",
        action="store_true",
        help="do not wait for the other device, which may be lost: continue from the checkpoint on this device",
    )
    change = _client(commands, "deadline", "change or remove the deadline of a job", _deadline)
    _add_job(change)
    change.add_argument("when", type=deadline_or_none, help='"8h", "07:00", "2026-12-24 18:00" or "none"')
    _client(commands, "reload", "apply the configuration files", _reload)


def _client(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    run: Callable[[Arguments], int],
    *,
    has_json: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the agent's control socket is")
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="number or name")


# --- the daemon


def _run(arguments: Arguments) -> int:
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]  # asyncio can do without; 4 of the daemon's 35 MB
    import asyncio

    with absent("typing_extensions"):
        import msgspec  # noqa: F401  # has those of `typing` instead, which take 0.4 MB less

    from port_agent.supervisor.context import Settings
    from port_agent.supervisor.daemon import Daemon

    state_dir = arguments.state_dir or _environment_dir("STATE_DIRECTORY") or places.own_state_dir()
    runtime_dir = arguments.runtime_dir or _environment_dir("RUNTIME_DIRECTORY") or places.own_runtime_dir()
    settings = Settings(
        state_dir=state_dir.absolute(),
        runtime_dir=runtime_dir.absolute(),
        config=(arguments.config or places.SYSTEM_CONFIG).absolute(),
        sysfs_root=arguments.sysfs_root.absolute() if arguments.sysfs_root else None,
    )
    if sys.stderr.isatty():
        print(f"port-agent: state in {settings.state_dir}, socket in {settings.runtime_dir}", file=sys.stderr)
    asyncio.run(Daemon(settings).run())
    return 0


def _environment_dir(name: str) -> Path | None:
    """Return the directory that systemd created for the agent.

    The variable may list several; the first one is the agent's.
    """
    value = os.environ.get(name, "").partition(":")[0]
    return Path(value) if value else None


# --- clients


def _submit(arguments: Arguments) -> int:
    client = places.connect(arguments.runtime_dir)
    if arguments.kind == "train" and arguments.bundle is None:
        raise UsageError("give a bundle: port-agent job submit job.port (make one with `port-agent plan`)")
    if arguments.kind == "train" and not arguments.bundle.is_file():
        raise UsageError(f"{arguments.bundle} is a directory; give a bundle, or --kind mcu for a model directory")
    if arguments.kind == "mcu" and arguments.bundle is None:
        raise UsageError("give a model directory: port-agent job submit build/ --kind mcu (`port-agent mcu compile`)")
    fields: dict[str, Any] = {
        "kind": arguments.kind,
        "name": arguments.name or _job_name(arguments),
        "data": str(arguments.data.absolute()) if arguments.data else None,
        "waits_for_data": arguments.inbox,
        "federated": arguments.federated,
        "terms": federation_terms(arguments),
        "movable": arguments.movable,
        "epochs": arguments.epochs,
        "steps": arguments.steps,
        "checkpoint_every": arguments.checkpoint_every,
        "priority": arguments.priority,
        "deadline_at": arguments.deadline,
        "page_dirs": [str(folder.absolute()) for folder in arguments.page_dirs],
        "arguments": _board_arguments(arguments),
    }
    boards = None if arguments.boards is None else _several_boards(arguments, client)
    if arguments.bundle is not None and arguments.kind == "mcu":
        fields["bundle"] = str(arguments.bundle.absolute())  # a directory, or a file that refers to others next to it
    if boards is not None:
        return _submit_divided(arguments, client, fields, boards)
    from port_agent.cli.daemon_views import promise_lines

    job = client.submit(arguments.bundle if arguments.kind == "train" else None, **fields)
    lines = [f"Job {job['id']} ({job['name']}) is queued. See it with: port-agent status", *promise_lines(job)]
    if arguments.federated:
        lines[0] = f"Job {job['id']} ({job['name']}) waits for rounds. {rounds_led(arguments, job)}"
    if job["inbox"]:
        lines.append(
            f"It trains on files that arrive in {job['inbox']} (or: port-agent job feed {job['name']} FILE...)"
        )
    return _answer(arguments, job, "\n".join(lines))


def _board_arguments(arguments: Arguments) -> list[str]:
    named = (("--board", arguments.board), ("--port", arguments.port), ("--serial", arguments.serial))
    words = [word for name, value in named if value is not None for word in (name, value)]
    words += ["--simulate"] if arguments.simulate else []
    if words and arguments.kind != "mcu":
        raise UsageError(f"{words[0]} is for microcontrollers; add --kind mcu")
    return words


def _several_boards(arguments: Arguments, client: "ControlClient") -> list[list[str]]:
    """Return the arguments that select each of several boards."""
    if arguments.kind != "mcu":
        raise UsageError("--boards is for microcontrollers; add --kind mcu")
    for name in ("port", "serial", "steps", "inbox", "federated"):
        if getattr(arguments, name):
            raise UsageError(f"--boards divides existing samples, counted in epochs; leave out --{name}")
    if arguments.simulate:
        if not arguments.boards.isdecimal() or not 1 <= int(arguments.boards) <= _MAX_BOARDS:
            raise UsageError(
                f"--boards is {shown(arguments.boards)}; with --simulate give a number, 1 to {_MAX_BOARDS}"
            )
        return [[] for _ in range(int(arguments.boards))]
    if arguments.boards == "all":
        found = client.get("/v1/status")["mcus"]
        boards = [["--serial", row["serial"]] if row["serial"] else ["--port", row["port"]] for row in found]
    else:
        boards = [
            ["--port", str(Path(word).absolute())] if "/" in word else ["--serial", word]
            for word in arguments.boards.split(",")
        ]
    if not boards:
        raise UsageError("the agent finds no board; plug one in (`port-agent mcu list` shows it), or name the ports")
    names = [os.path.realpath(name) if option == "--port" else name for option, name in boards]
    twice = [name for name in names if not name or names.count(name) > 1]
    if twice:
        raise UsageError(f"--boards is {shown(arguments.boards)}; name each board once, with commas between")
    return boards


def _submit_divided(
    arguments: Arguments, client: "ControlClient", fields: dict[str, Any], boards: list[list[str]]
) -> int:
    """Submit one job per board, each with its shard of the samples: all of them or none."""
    from port_agent.control.client import ControlError
    from port_agent.worker.shard import Shard

    jobs: list[dict[str, Any]] = []
    try:
        for number, board in enumerate(boards, 1):
            words = [*fields["arguments"], *board, "--shard", str(Shard(number, len(boards)))]
            name = f"{fields['name']}.{number}-of-{len(boards)}"
            jobs.append(client.post("/v1/jobs", **fields | {"name": name, "arguments": words}))
    except ControlError:
        for job in jobs:
            client.post(f"/v1/jobs/{job['id']}/cancel")
        raise
    lines = [f"Job {job['id']} ({job['name']}) is queued" for job in jobs]
    lines.append("Each trains its part of the samples on its own board. See them with: port-agent status")
    return _answer(arguments, {"jobs": jobs}, "\n".join(lines))


def _job_name(arguments: Arguments) -> str:
    from port_agent.jobs.job import name_like

    return name_like(arguments.bundle.stem if arguments.bundle else arguments.kind)


def _status(arguments: Arguments) -> int:
    from port_agent.cli import daemon_views

    client = places.connect(arguments.runtime_dir)
    if arguments.watch and not arguments.json:
        return daemon_views.watch(lambda: client.get("/v1/status"))
    status = client.get("/v1/status")
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        daemon_views.show(daemon_views.status_screen(status))
    return 0


def _jobs(arguments: Arguments) -> int:
    from port_agent.cli import daemon_views

    answer = places.connect(arguments.runtime_dir).get(f"/v1/jobs?all={int(arguments.all)}")
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        daemon_views.show(daemon_views.jobs_table(answer["jobs"]))
    return 0


def _job(arguments: Arguments) -> int:
    from port_agent.cli import daemon_views

    job = places.connect(arguments.runtime_dir).get(_path(arguments))
    if arguments.json:
        print(json.dumps(job, indent=2))
    else:
        daemon_views.show(daemon_views.job_screen(job))
    return 0


def _logs(arguments: Arguments) -> int:
    client = places.connect(arguments.runtime_dir)
    path = f"{_path(arguments)}/logs?lines={arguments.lines}"
    if not arguments.follow:
        print(client.text(path), end="")
        return 0
    for chunk in client.follow(f"{path}&follow=1"):
        print(chunk, end="", flush=True)
    return 0


def _result(arguments: Arguments) -> int:
    size = places.connect(arguments.runtime_dir).download(f"{_path(arguments)}/result", arguments.output)
    return _answer(arguments, {"file": str(arguments.output), "bytes": size}, f"{arguments.output}: {size} bytes")


def _feed(arguments: Arguments) -> int:
    client = places.connect(arguments.runtime_dir)
    answers = []
    for file in arguments.files:
        answers.append(client.upload(f"/v1/inbox/{_job_named(arguments)}/{quote(file.name)}", file))
    total = sum(answer["bytes"] for answer in answers)
    return _answer(arguments, {"files": answers}, f"{len(answers)} files, {total} bytes are in the inbox")


def _pause(arguments: Arguments) -> int:
    client = places.connect(arguments.runtime_dir)
    if arguments.job is not None:
        if arguments.for_s is not None:
            raise UsageError("--for pauses everything for a time; leave out the job")
        job = client.post(f"{_path(arguments)}/pause")
        return _answer(arguments, job, f"Job {job['id']} ({job['name']}) is paused; port-agent job resume {job['id']}")
    answer = client.post("/v1/pause", for_s=arguments.for_s)
    until = answer["paused_until"]
    end = f"until {datetime.fromtimestamp(until):%a %d %b %H:%M}" if until else "until `port-agent job resume`"
    return _answer(arguments, answer, f"No job trains {end}.")


def _resume(arguments: Arguments) -> int:
    client = places.connect(arguments.runtime_dir)
    if arguments.job is None:
        return _answer(arguments, client.post("/v1/resume"), "Training resumes when conditions allow.")
    job = client.post(f"{_path(arguments)}/resume")
    return _answer(arguments, job, f"Job {job['id']} ({job['name']}) is {job['state'].replace('_', ' ')}.")


def _run_now(arguments: Arguments) -> int:
    job = places.connect(arguments.runtime_dir).post(f"{_path(arguments)}/run-now", for_s=arguments.for_s)
    text = f"Job {job['id']} ({job['name']}) runs now, before all others; power, heat, memory and disk still stop it."
    return _answer(arguments, job, text)


def _not_now(arguments: Arguments) -> int:
    answer = places.connect(arguments.runtime_dir).post("/v1/pause", for_s=arguments.for_s)
    until = datetime.fromtimestamp(answer["paused_until"])
    return _answer(
        arguments, answer, f"No job trains until {until:%a %d %b %H:%M}; `port-agent job resume` ends this earlier."
    )


def _cancel(arguments: Arguments) -> int:
    job = places.connect(arguments.runtime_dir).post(f"{_path(arguments)}/cancel")
    return _answer(arguments, job, f"Job {job['id']} ({job['name']}) is cancelled.")


def _priority(arguments: Arguments) -> int:
    job = places.connect(arguments.runtime_dir).post(f"{_path(arguments)}/change", priority=arguments.value)
    return _answer(arguments, job, f"Job {job['id']} ({job['name']}) has priority {job['priority']}.")


def _recall(arguments: Arguments) -> int:
    job = places.connect(arguments.runtime_dir).post(f"{_path(arguments)}/recall", force=arguments.force)
    text = (
        f"Job {job['id']} ({job['name']}) comes back with its checkpoint. See it with: port-agent job show {job['id']}"
    )
    if arguments.force:
        text = f"Job {job['id']} ({job['name']}) continues here from the checkpoint on this device, and stays here."
    return _answer(arguments, job, text)


def _deadline(arguments: Arguments) -> int:
    at = arguments.when
    job = places.connect(arguments.runtime_dir).post(f"{_path(arguments)}/change", deadline_at=at)
    shown = "no deadline" if at is None else f"the deadline {datetime.fromtimestamp(at):%a %d %b %H:%M}"
    return _answer(arguments, job, f"Job {job['id']} ({job['name']}) has {shown}.")


def _why(arguments: Arguments) -> int:
    from port_agent.cli import daemon_views

    query = "" if arguments.since is None else f"?since={arguments.since:.3f}"
    answer = places.connect(arguments.runtime_dir).get(f"/v1/why{query}")
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        daemon_views.show_timeline(answer["entries"])
    return 0


def _reload(arguments: Arguments) -> int:
    answer = places.connect(arguments.runtime_dir).post("/v1/reload")
    files = answer["settings"]["files"]
    text = f"In force: {', '.join(files) or 'the defaults (no configuration file)'}"
    if answer["after_restart"]:
        text += f"\nFrom the next start on: {', '.join(answer['after_restart'])}"
    return _answer(arguments, answer, text)


def _doctor(arguments: Arguments) -> int:
    from port_agent.cli import daemon_views
    from port_agent.control.client import ControlError

    try:
        agent = places.connect(arguments.runtime_dir, _DOCTOR_PATIENCE_S)
        answer = agent.post("/v1/doctor", flash=not arguments.no_flash)
    except ControlError as error:
        if error.status is not None:
            raise
        answer = _examine_here(arguments, error)
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        daemon_views.show(daemon_views.doctor_screen(answer))
    return int(any(check["verdict"] == "bad" for check in answer["checks"]))


def _examine_here(arguments: Arguments, error: "ControlError") -> dict[str, Any]:
    """Return what this process can examine when no agent answers."""
    from port_agent.health.doctor import Check, Verdict, examine
    from port_agent.policy.config import load_config

    state_dir = arguments.state_dir or places.own_state_dir()
    checks = [Check("agent", Verdict.BAD, "not running" if error.is_absent else "no answer", str(error))]
    checks += examine(state_dir, load_config(places.SYSTEM_CONFIG), flash_test=not arguments.no_flash)
    return {"v": 1, "checks": [check.as_json() for check in checks], "health": []}


def _completion(arguments: Arguments) -> int:
    import shtab

    from port_agent.cli import build_parser

    print(shtab.complete(build_parser(), shell=arguments.shell))
    return 0


def _answer(arguments: Arguments, value: Any, text: str) -> int:
    print(json.dumps(value, indent=2) if arguments.json else text)
    return 0


def _path(arguments: Arguments) -> str:
    return f"/v1/jobs/{_job_named(arguments)}"


def _job_named(arguments: Arguments) -> str:
    """Return the number or name of the job; raises UsageError for a word that cannot be either."""
    from port_agent.jobs.job import NAME

    if not NAME.fullmatch(arguments.job):
        raise UsageError(f"{shown(arguments.job)} is not a valid number or name of a job; see `port-agent job list`")
    return str(arguments.job)
