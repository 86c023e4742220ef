"""Commands about federated averaging: lead a federation, show its state, end it."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from port_agent.cli.arguments import UsageError, duration, positive_number, whole_number, writable_file
from port_agent.control import places
from port_agent.federate.privacy import DELTA, epsilon, noisy_rounds
from port_planner.base.units import format_seconds, shown

_MOST = 1 << 20
_LONGEST_S = 30 * 86400.0
_ROUNDS_SHOWN = 10
_KINDS = ("federations", "memberships")
_STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"proximal_mu": None},
    "fedavgm": {"server_rate": 1.0, "server_momentum": 0.9},
    "fedadam": {"server_rate": 0.1, "server_betas": (0.9, 0.99), "server_tau": 1e-3},
}
"""Options of each strategy with their default values; None: no default."""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    federate = commands.add_parser(
        "federate", help="average a job's weights over paired devices; data stays on each device"
    )
    federate.description = (
        "Federated averaging over paired devices. On each device: `port-agent job submit job.port --federated`, with a "
        "bundle of the same model made from that device's own data, under the same name; or `port-agent finetune "
        "MODEL ... --submit --federated --name NAME`, whose adapters are averaged. On the device that leads: "
        "`port-agent peer federate start JOB`. Each trains its rounds as its own policy allows; needs pip install "
        "'port-agent[federate]' on all."
    )
    verbs = federate.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_start(verbs)
    status = _verb(verbs, "status", "show the federations that this device leads or takes part in", _status)
    status.add_argument("job", nargs="?", help="number or name (default: all)")
    status.add_argument(
        "--plot", type=writable_file, metavar="FILE.svg", help="draw the loss by round and who took part; for one JOB"
    )
    _verb(verbs, "stop", "end a federation after the finished rounds", _stop).add_argument("job", help="number or name")

    leave = _verb(
        verbs, "leave", "stop taking part in a job's federation; its leader may no longer lead the job", _leave
    )
    leave.add_argument("job", help="number or name")


def _add_start(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    start = _verb(verbs, "start", "lead a federation of a job on this device, from the weights in its bundle", _start)
    start.add_argument("job", help="number or name of a federated job")
    start.add_argument("--rounds", type=whole_number(1, _MOST), required=True, help="how often weights are averaged")
    start.add_argument(
        "--min-devices",
        type=whole_number(1, _MOST),
        default=2,
        metavar="N",
        help="devices that must be ready, including this one (default 2)",
    )
    start.add_argument(
        "--goal",
        type=whole_number(0, _MOST),
        default=0,
        metavar="N",
        help="replies that end a round (default: those of all devices asked)",
    )
    start.add_argument(
        "--round-timeout",
        type=duration,
        default=3600.0,
        dest="timeout_s",
        metavar="TIME",
        help="longest round; it ends without the devices that have not replied (default 1h)",
    )
    start.add_argument(
        "--min-share",
        type=positive_number,
        default=0.5,
        metavar="NUMBER",
        help="abandon and repeat a round if less than this share of the devices asked reply (default 0.5)",
    )
    _add_strategy(start)
    start.add_argument(
        "--clip", type=positive_number, default=0.0, metavar="NORM", help="clip each device's change to this norm"
    )
    start.add_argument(
        "--noise",
        type=positive_number,
        default=0.0,
        metavar="NOISE",
        help="with --clip: Gaussian noise of NOISE times the norm over the number of devices (differential privacy; "
        "its epsilon over all rounds is printed)",
    )
    start.add_argument(
        "--epsilon-budget",
        type=positive_number,
        metavar="EPSILON",
        help="with --noise: a device stops contributing when its data would have spent more than this epsilon over "
        "all federations",
    )
    start.add_argument(
        "--secure",
        action="store_true",
        help="SecAgg+: this device sees only sums of the changes of three or more devices",
    )


def _add_strategy(start: argparse.ArgumentParser) -> None:
    start.add_argument(
        "--strategy",
        choices=tuple(_STRATEGIES),
        default="fedavg",
        help="how an average is applied: as it is (default), likewise with a proximal term in the devices' losses, "
        "with server momentum, or as a gradient for Adam",
    )
    start.add_argument(
        "--server-rate",
        type=positive_number,
        metavar="NUMBER",
        help="learning rate of fedavgm (default 1) and fedadam (default 0.1)",
    )
    start.add_argument("--server-momentum", type=_factor, metavar="NUMBER", help="momentum of fedavgm (default 0.9)")
    start.add_argument(
        "--server-betas", type=_factor, nargs=2, metavar="NUMBER", help="betas of fedadam (default 0.9 0.99)"
    )
    start.add_argument(
        "--proximal-mu",
        type=positive_number,
        metavar="NUMBER",
        help="factor of fedprox's term, which the jobs were made with",
    )
    start.add_argument("--server-tau", type=positive_number, metavar="NUMBER", help="tau of fedadam (default 0.001)")


def _factor(text: str) -> float:
    """Parse a number from 0 to below 1; raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a valid number from 0 to below 1; write it like 0.9")
    return value


def _server(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the strategy and its numbers in the agent's form.

    Raises UsageError for numbers of another strategy, and for one that is missing.
    """
    usual = _STRATEGIES[arguments.strategy]
    every = sorted({option for options in _STRATEGIES.values() for option in options})
    given = {option: value for option in every if (value := getattr(arguments, option)) is not None}
    if other := given.keys() - usual.keys():
        raise UsageError(f"{_flag(min(other))} does not apply to --strategy {arguments.strategy}; leave it out")
    settings = usual | given
    for option, value in settings.items():
        if value is None:
            raise UsageError(f"--strategy {arguments.strategy} needs {_flag(option)}; give the one of its jobs")
    named = {option.removeprefix("server_"): value for option, value in settings.items()}
    return {"strategy": arguments.strategy, **named}


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, run: Any
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text)
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the agent's control socket is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _start(arguments: argparse.Namespace) -> int:
    if arguments.min_share > 1.0:
        raise UsageError(f"--min-share is {arguments.min_share:g}; give a share of the devices asked, at most 1")
    if arguments.timeout_s > _LONGEST_S:
        raise UsageError(f"a round of {format_seconds(arguments.timeout_s)} is too long; give at most 30 days")
    names = ("rounds", "min_devices", "goal", "timeout_s", "min_share", "clip", "noise", "epsilon_budget", "secure")
    settings = {name: getattr(arguments, name) for name in names} | {"server": _server(arguments)}
    answer = places.connect(arguments.runtime_dir).post("/v1/federations", job=arguments.job, settings=settings)
    text = f"Leading a federation of job {answer['job']} ({answer['name']}), {arguments.rounds} rounds. See it with: port-agent peer federate status"
    if arguments.clip:
        text += f"\nAfter all rounds: {_privacy(arguments.noise, arguments.rounds)}."
    print(json.dumps(answer, indent=2) if arguments.json else text)
    return 0


def _privacy(noise: float, rounds: int) -> str:
    """Return the differential privacy after a number of rounds, in words."""
    if not noise:
        return "no differential privacy without --noise"
    note = "device's data (its change in the average, or none), against all but this leader"
    return (
        f"epsilon {epsilon(noisy_rounds(noise, rounds)):.2f} at delta {DELTA:g} for each {note}, over {_rounds(rounds)}"
    )


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"


def _status(arguments: argparse.Namespace) -> int:
    answer = places.connect(arguments.runtime_dir).get("/v1/federations")
    led, member_of = ([one for one in answer[kind] if _is_meant(one, arguments.job)] for kind in _KINDS)
    if arguments.plot is not None:
        _plot(led, arguments.plot)
    if arguments.json:
        print(json.dumps({"federations": led, "memberships": member_of}, indent=2))
        return 0
    from port_agent.cli.daemon_views import membership_line

    parts = ["\n".join(_lines(one)) for one in led]
    parts += [f"Job {one['job']} ({one['name']}): {membership_line(one)}.{_spent(one['privacy'])}" for one in member_of]
    print("\n\n".join(parts) or "This device leads no federation and is in none.")
    return 0


def _plot(led: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the rounds of the only selected federation.

    Raises UsageError if none or several are selected, and OSError.
    """
    if len(led) != 1:
        names = ", ".join(one["name"] for one in led)
        raise UsageError(
            f"--plot draws one federation: name its JOB, of {names}"
            if names
            else "this device does not lead this federation"
        )
    from port_agent.system.atomic_file import write_atomically
    from port_planner.draw.rounds import RoundMark, rounds_svg

    (run,) = led
    rounds = [
        RoundMark(one["number"], one["seconds"], one["loss"], tuple(one["names"]), one["lost"], one["abandoned"])
        for one in run["history"]
    ]
    title = f"{run['name']}: {run['done']} of {run['settings']['rounds']} rounds"
    write_atomically(path, rounds_svg(rounds, title).encode())


def _spent(privacy: Mapping[str, Any] | None) -> str:
    """Return how much of its privacy budget a job's data has spent, and what is left, in words."""
    if privacy is None or not (privacy["rounds"] or privacy["bare"]):
        return ""
    if privacy["bare"]:
        return f"\n  its data was in {_rounds(privacy['bare'])} without noise: no differential privacy"
    left = ""
    if privacy["budget"] is not None:
        left = f", {max(0.0, privacy['budget'] - privacy['epsilon']):.2f} left of {privacy['budget']:g}"
    return f"\n  its data has spent epsilon {privacy['epsilon']:.2f} at delta {DELTA:g} in {_rounds(privacy['rounds'])}{left}"


def _is_meant(one: Mapping[str, Any], job: str | None) -> bool:
    return job is None or job in (one["name"], str(one["job"]))


def _lines(run: Mapping[str, Any]) -> list[str]:
    settings = run["settings"]
    private = " Secure aggregation." if settings["secure"] else ""
    if settings["clip"]:
        private = f" Changes clipped to {settings['clip']:g}, noise {settings['noise']:g}: {_privacy(settings['noise'], run['done'])}."
    lines = [
        f"Job {run['job']} ({run['name']}): {run['state']}, {run['done']} of {settings['rounds']} rounds, "
        f"{run['abandoned']} abandoned.{private}"
    ]
    if run["training"]:
        lines.append(f"  now: round {run['done'] + 1} on {', '.join(run['training'])}")
        lines += [f"  waiting for {name}: {what}" for name, what in sorted(run["awaited"].items())]
    elif run["waits"]:
        lines.append(f"  waiting: {run['waits']}")
    lines += [f"  {_round(one)}" for one in run["history"][-_ROUNDS_SHOWN:]]
    if run["weights"]:
        where = (
            "the directory that --out names"
            if run["kind"] == "finetune"
            else f"port-agent job result {run['name']} -o FILE"
        )
        lines.append(f"  weights: {run['weights']}; on each device: {where}")
    if run["without"]:
        lines.append(f"  {', '.join(run['without'])}: has not received these weights; lead another round to bring them")
    return lines


def _round(one: Mapping[str, Any]) -> str:
    if one["abandoned"]:
        return f"round {one['number']}: abandoned after {format_seconds(one['seconds'])}: {one['abandoned']}"
    lost = "".join(f"; without {name} ({why})" for name, why in one["lost"].items())
    loss = "" if one["loss"] is None else f", loss {one['loss']:.4f}"
    return f"round {one['number']}: {one['devices']} devices in {format_seconds(one['seconds'])}{loss}{lost}"


def _stop(arguments: argparse.Namespace) -> int:
    client = places.connect(arguments.runtime_dir)
    answer = client.post(f"/v1/federations/{arguments.job}/stop")
    text = f"The federation of job {answer['job']} ({answer['name']}) ended after {answer['done']} rounds."
    print(json.dumps(answer, indent=2) if arguments.json else text)
    return 0


def _leave(arguments: argparse.Namespace) -> int:
    answer = places.connect(arguments.runtime_dir).post(f"/v1/federations/{arguments.job}/leave")
    text = f"Job {answer['job']} ({answer['name']}) is no longer led by another device."
    print(json.dumps(answer, indent=2) if arguments.json else text)
    return 0
