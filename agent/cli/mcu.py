"""Commands of this area: microcontrollers on serial ports, and simulated ones."""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import (
    duration,
    positive_number,
    readable_file_or_folder,
    readable_folder,
    size,
    whole_number,
    writable_file,
    writable_folder,
)
from agent.cli.terminal import terminal

if TYPE_CHECKING:
    from agent.mcu.board.firmware import Firmware
    from agent.mcu.board.simulate import Simulator
    from agent.mcu.job import BoardJobSpec
    from agent.mcu.trainer import BoardTrainer
    from agent.worker.shard import Shard

Adder = Callable[..., argparse.ArgumentParser]


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    mcu = commands.add_parser("mcu", help="train int8 models on microcontrollers over a serial port")
    actions = mcu.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_list(actions.add_parser)
    _add_compile(actions.add_parser)
    _add_build(actions.add_parser)
    _add_flash(actions.add_parser)
    _add_train(actions.add_parser)
    _add_eval(actions.add_parser)
    _add_logs(actions.add_parser)
    _add_record(actions.add_parser)
    _add_simulate(actions.add_parser)


def _add_list(add: Adder) -> None:
    parser = add("list", help="show boards on serial ports, their firmware and model")
    parser.add_argument("--port", help="also ask this port (ptys are not listed by the system)")
    parser.add_argument("--watch", action="store_true", help="go on, and show every board that is plugged in or out")
    parser.add_argument("--boards", action="store_true", help="show the boards that firmware can be built for instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_list)


def _add_compile(add: Adder) -> None:
    parser = add("compile", help="compile the PyTorch model of a project (project.py) to int8 tables")
    parser.add_argument("project", type=readable_folder, help="directory with project.py")
    parser.add_argument("-o", "--out", type=writable_folder, help="directory to write (default: PROJECT/build)")
    parser.add_argument(
        "--sparse-update", type=size, metavar="RAM",
        help="choose which biases and weights are trained: measure what each gains on the project's training samples, "
        "solve for the best sets whose arena and trained parameters take at most RAM, such as 12K, and take the one that "
        "measures best when it is trained itself",
    )  # fmt: skip
    parser.add_argument(
        "--dynamic-update", type=positive_number, metavar="SHARE", help="in every step train only this share of each layer's "
        "channels, such as 0.25: those with the largest gradients (groups of four); less work, but no bands within --ram",
    )  # fmt: skip
    parser.add_argument(
        "--q88", action="store_true", help="give every trained weight a low byte and round to nearest: ends nearer to fp32 than "
        "stochastic rounding of int8, takes a byte more per trained weight; where --ram does not hold that, the layers with most "
        "weights have none",
    )  # fmt: skip
    parser.add_argument(
        "--ram", type=size, help="let arena and trained parameters take at most RAM, such as 16K; what is not kept between "
        "forward and backward is computed again, with the same bits",
    )  # fmt: skip
    parser.add_argument(
        "--page", choices=["psram", "nor", "sd"], help="external memory that tensors may be paged to where that takes less "
        "energy than computing again, or memory that nothing else frees; psram also holds what is trained; goes with --ram",
    )  # fmt: skip
    parser.add_argument(
        "--deadline", type=duration, metavar="TIME", help="refuse a training step that takes longer per sample, such as "
        "50ms, by the instruction counts and the board's file; goes with --ram",
    )  # fmt: skip
    parser.add_argument(
        "--per-joule", action="store_true", help="choose between training less and recomputing or paging more: the project's "
        "scheme (or the one --sparse-update finds), a quarter, half and three quarters of the layers, and everything are "
        "planned for --ram and trained on the project's samples in the host's engine; of those within one standard error of "
        "the best accuracy the one that gains most per joule is taken",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_compile)


def _add_build(add: Adder) -> None:
    parser = add("build", help="build the firmware of a compiled model for a board")
    parser.add_argument("model", type=readable_folder, help="directory of a compiled model")
    parser.add_argument("--board", required=True, help="board name; see: port-agent mcu list --boards")
    parser.add_argument("-o", "--out", type=writable_folder, help="directory of the images (default: MODEL/firmware)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_build)


def _add_flash(add: Adder) -> None:
    parser = add("flash", help="build the firmware of a model and write it to a board")
    parser.add_argument("model", type=readable_folder, help="directory of a compiled model")
    parser.add_argument("--board", required=True, help="board name; see: port-agent mcu list --boards")
    parser.add_argument("--port", help="serial port of the board")
    parser.add_argument("--drive", type=writable_folder, help="the boot loader's drive, where images are copied")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_flash)


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=readable_file_or_folder, help="job.json, or the directory of a compiled model")
    parser.add_argument(
        "--data", type=readable_file_or_folder, help=".npz or .safetensors file with x and y, or an inbox directory"
    )
    parser.add_argument(
        "--test", type=readable_file_or_folder, help="samples to evaluate on (default: every fifth of the data)"
    )
    _add_port(parser)
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def _add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", help="serial port or pty (default: the only known board plugged in)")
    parser.add_argument("--serial", help="USB serial number of the board: found again after a replug")


def _add_train(add: Adder) -> None:
    parser = add("train", help="train the model on the board; interrupt and run again to go on")
    _add_job(parser)
    parser.add_argument("--epochs", type=whole_number(1), help="passes over the training data")
    parser.add_argument("--steps", type=whole_number(1), help="stop after so many samples")
    parser.add_argument("--lr", type=positive_number, dest="learning_rate", help="learning rate (default 0.03)")
    parser.add_argument("--rule", choices=["stochastic", "nearest", "truncate", "q88"], help="rounding of the update")
    parser.add_argument(
        "--seed", type=whole_number(0, 2**32 - 1), help="of the order of samples and of rounding (default 1)"
    )
    parser.add_argument(
        "--snapshot-every", type=whole_number(1), help="samples between snapshots on the host (default 200)"
    )
    parser.add_argument(
        "--shard", type=_shard, metavar="K/N", help="train only part K of N of the samples, such as 2/3: several boards, each "
        "with a part and a --state-dir of its own, train every sample exactly once; it goes on only while its part is unchanged",
    )  # fmt: skip
    parser.add_argument("--state-dir", type=writable_folder, help="where snapshots are kept (default: beside the job)")
    parser.add_argument("--out", type=writable_file, help="write the trained parameters here")
    parser.set_defaults(run=run_train)


def _shard(text: str) -> "Shard":
    from agent.worker.shard import Shard

    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_eval(add: Adder) -> None:
    parser = add("eval", help="accuracy and loss of the weights that are on the board now")
    _add_job(parser)
    parser.set_defaults(run=run_eval)


def _add_logs(add: Adder) -> None:
    parser = add(
        "logs", help="counters of a board: frames, errors, steps, stack, resets",
        description="Show what a board counts: frames, errors, steps, stack, resets. What a job in the agent's queue "
        "did is in its own log: port-agent logs JOB.",
    )  # fmt: skip
    _add_port(parser)
    parser.add_argument("--follow", action="store_true", help="print again every second")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=run_logs)


def _add_record(add: Adder) -> None:
    parser = add("record", help="write a connected stream of samples into an inbox, for a job that waits for data")
    parser.add_argument("model", type=readable_folder, help="directory of the compiled model")
    parser.add_argument("--inbox", type=writable_folder, required=True, help="directory that the job reads")
    parser.add_argument("--source", default="-", help='"-" (standard input), a path, or tcp:HOST:PORT; JSON lines x, y')
    parser.add_argument("--per-file", type=whole_number(1), default=64, help="samples per file (default 64)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=run_record)


def _add_simulate(add: Adder) -> None:
    parser = add("simulate", help="run the firmware without a board, in QEMU, on a real pty")
    parser.add_argument(
        "model", type=readable_folder, help="directory of a compiled model, or of a project: then it is adapted at once"
    )
    parser.add_argument("--board", help="qemu-m4f (default), qemu-m7f, qemu-m3, qemu-m0, qemu-m0-32k or posix")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=run_simulate)


def run_list(arguments: argparse.Namespace) -> int:
    """Show what is plugged in."""
    if arguments.boards:
        return _list_boards(arguments.json)
    from agent.mcu.protocol.ports import POLL_S

    before: list[Any] | None = None
    while True:
        ports = _ports(arguments.port)
        if ports != before:
            _show_ports(ports, arguments.json)
        if not arguments.watch:
            return 0
        before = ports
        time.sleep(POLL_S)


def _ports(given: str | None) -> list[Any]:
    from agent.mcu.protocol.ports import PortInfo, list_serial_ports

    ports = list_serial_ports()
    if given is None:
        return ports
    return [PortInfo(given, None, None, "given", ())] + [port for port in ports if port.path != given]


def _show_ports(ports: list[Any], as_json: bool) -> None:
    from agent.cli.mcu_views import listed_json, show_list

    rows = [_ask(port) for port in ports]
    if as_json:
        print(json.dumps([listed_json(row) for row in rows]), flush=True)
    elif not rows:
        print("no board on any serial port; try one without hardware: port-agent mcu simulate MODEL")
    else:
        show_list(rows)


def _ask(port: Any) -> Any:
    from agent.cli.mcu_views import Listed
    from agent.mcu.errors import McuError
    from agent.mcu.protocol.session import Patience, Session
    from agent.mcu.protocol.transport import SerialTransport

    try:
        session = Session(SerialTransport(port.path), Patience(give_up_s=1.5))
    except McuError as error:
        return Listed(port, None, str(error))
    session.close()
    return Listed(port, session.info, None)


def _list_boards(as_json: bool) -> int:
    from rich.table import Table

    from agent.cli.mcu_views import show_json
    from agent.mcu.board.catalogue import BOARDS
    from planner.ir.units import format_bytes

    if as_json:
        show_json(
            [{"name": b.name, "title": b.title, "ram_bytes": b.ram_bytes, "flash_bytes": b.flash_bytes} for b in BOARDS]
        )
        return 0
    table = Table("name", "board", "RAM", "flash", "flashed with", box=None, pad_edge=False)
    for board in BOARDS:
        methods = ", ".join(method.value for method in board.methods)
        table.add_row(board.name, board.title, format_bytes(board.ram_bytes), format_bytes(board.flash_bytes), methods)
    terminal().print(table)
    return 0


def run_compile(arguments: argparse.Namespace) -> int:
    """Run a project and write its tables and data.

    Raises BoardJobError for a deadline, a page medium or a choice per joule without a budget.
    """
    from agent.cli.mcu_views import (
        fitted_json,
        held_json,
        show_fitted,
        show_held,
        show_json,
        show_valuation,
        valuation_json,
    )
    from agent.cli.progress import StageBar
    from agent.mcu.errors import BoardJobError
    from agent.mcu.model import read_model
    from agent.mcu.project import (
        choose_project,
        fit_project,
        hold_project,
        load_project,
        value_project,
        widen_project,
        without_low_bytes,
        write_project,
    )

    if arguments.deadline is not None and arguments.ram is None:
        raise BoardJobError("--deadline says how fast a plan within --ram must be; give --ram too")
    if arguments.page is not None and arguments.ram is None:
        raise BoardJobError("--page says where a plan within --ram may put what does not fit; give --ram too")
    if arguments.per_joule and arguments.ram is None:
        raise BoardJobError("--per-joule chooses among plans within --ram; give --ram too")
    if arguments.per_joule and arguments.dynamic_update is not None:
        raise BoardJobError(
            "--per-joule measures trainings of whole layers, --dynamic-update trains a share of each; give one of them"
        )
    out = arguments.out or arguments.project / "build"
    project, fitted = load_project(arguments.project), None
    if arguments.q88:
        project = widen_project(project)
    if arguments.sparse_update is not None:
        with StageBar(("analyse",), quiet=arguments.json) as bar:
            project, fitted = fit_project(
                project, arguments.sparse_update, lambda done, total: bar.update("analyse", done / total)
            )
    if arguments.dynamic_update is not None:
        project = choose_project(project, arguments.dynamic_update)
    held = valuation = None
    if arguments.per_joule:
        with StageBar(("measure",), quiet=arguments.json) as bar:
            project, valuation = value_project(
                project, arguments.ram, arguments.deadline, arguments.page,
                lambda done, total: bar.update("measure", done / total),
            )  # fmt: skip
        held = valuation.chosen.fitted
    elif arguments.ram is not None:
        project, held = hold_project(project, arguments.ram, arguments.deadline, arguments.page)
    job = write_project(project, out)
    model = read_model(out)
    figures: dict[str, Any] = {
        "job": str(job), "model": model.name, "hash": model.sha256.hex(), "arena_bytes": model.arena_bytes,
        "parameter_bytes": model.parameter_bytes,
    }  # fmt: skip
    if fitted is not None:
        figures["scheme"] = fitted_json(fitted)
    if valuation is not None:
        figures["per_joule"] = valuation_json(valuation)
    if held is not None:
        figures["plan"] = held_json(held)
    narrow = without_low_bytes(project) if arguments.q88 else ()
    if arguments.q88:
        figures["without_low_bytes"] = narrow
    if arguments.json:
        show_json(figures)
    else:
        if fitted is not None:
            show_fitted(fitted)
        if valuation is not None:
            show_valuation(valuation)
        if held is not None:
            show_held(held)
        if narrow:
            print(
                f"no low bytes, which do not fit: {', '.join(narrow)}; the Q8.8 rule rounds their weights stochastically"
            )
        print(
            f"{model.name}: arena {model.arena_bytes:,} B, trained parameters {model.parameter_bytes:,} B; wrote {out}"
        )
        print(f"next: port-agent mcu simulate {out}, or port-agent mcu flash --board BOARD {out}")
    return 0


def run_build(arguments: argparse.Namespace) -> int:
    """Build an image."""
    from agent.cli.mcu_views import firmware_json, show_firmware, show_json

    firmware = _build(arguments)
    if arguments.json:
        show_json(firmware_json(firmware))
    else:
        show_firmware(firmware)
    return 0


def _build(arguments: argparse.Namespace) -> "Firmware":
    from agent.mcu.board.firmware import build_firmware

    out = getattr(arguments, "out", None) or arguments.model / "firmware"
    return build_firmware(arguments.board, arguments.model, out)


def run_flash(arguments: argparse.Namespace) -> int:
    """Build and write an image."""
    from agent.cli.mcu_views import show_json
    from agent.mcu.board.flash import advice, flash

    firmware = _build(arguments)
    if arguments.dry_run:
        print(advice(firmware.board, firmware, arguments.port))
        return 0
    report = flash(firmware.board, firmware, arguments.port, arguments.drive)
    if arguments.json:
        show_json({"method": report.method.value, "copied_to": report.copied_to and str(report.copied_to)})
    else:
        print(f"flashed with {report.method.value}; look at it with: port-agent mcu list")
    return 0


def _spec(arguments: argparse.Namespace) -> "BoardJobSpec":
    from dataclasses import replace

    from agent.mcu.job import read_job, with_settings
    from agent.mcu.protocol.messages import Rule

    spec = read_job(arguments.job)
    given = {name: getattr(arguments, name, None) for name in ("data", "test", "port", "serial", "out", "shard")}
    spec = replace(spec, **{name: value for name, value in given.items() if value is not None})
    rule = getattr(arguments, "rule", None)
    names = ("epochs", "steps", "learning_rate", "seed", "snapshot_every")
    changes = {name: getattr(arguments, name, None) for name in names}
    return with_settings(spec, **changes, rule=None if rule is None else Rule[rule.upper()])


def run_train(arguments: argparse.Namespace) -> int:
    """Train on a board, with a bar, until done or interrupted."""
    spec = _spec(arguments)
    folder = arguments.job if arguments.job.is_dir() else arguments.job.parent
    return _train(spec, arguments.state_dir or folder / "state", arguments.json)


def _train(spec: "BoardJobSpec", state_dir: Path, as_json: bool, port: Path | None = None) -> int:
    from agent.cli.mcu_views import TrainView, show_json, show_summary, summary_of
    from agent.mcu.data import keep_shard
    from agent.mcu.job import load_data, make_link
    from agent.mcu.model import read_model
    from agent.mcu.trainer import BoardTrainer

    model = read_model(spec.model)
    training, held_out = load_data(spec, model)
    if spec.shard is not None:
        state_dir.mkdir(parents=True, exist_ok=True)
        keep_shard(state_dir, spec.shard, training)
    link = make_link(spec, model, port)
    view = TrainView(_total(spec, len(training)), as_json)
    trainer = BoardTrainer(link, model, training, spec.settings, state_dir, view, held_out=held_out)
    start = time.monotonic()
    trainer.start()
    with view:
        _run_until_interrupted(trainer)
    trainer.write_result(spec.out)
    figures = summary_of(link.device, view, trainer.position.step, time.monotonic() - start)
    trainer.close()
    if as_json:
        show_json({"event": "finished", **figures})
    else:
        show_summary(figures)
    return 0


def _total(spec: "BoardJobSpec", samples: int) -> int:
    whole = spec.settings.epochs * samples
    return whole if spec.settings.steps is None else min(whole, spec.settings.steps)


def _run_until_interrupted(trainer: "BoardTrainer") -> None:
    """Train; on Ctrl-C leave a place mark, so that the next run goes on from here."""
    from agent.mcu.errors import McuError

    try:
        trainer.run(lambda: False)
    except KeyboardInterrupt:
        try:
            trainer.leave()
        except McuError:
            print("the board did not answer any more; the next run goes on from the last snapshot")
        raise


def run_eval(arguments: argparse.Namespace) -> int:
    """Evaluate the weights on the board."""
    from agent.cli.mcu_views import show_json
    from agent.mcu.job import load_data, make_link
    from agent.mcu.model import read_model
    from agent.mcu.trainer import BoardTrainer

    spec = _spec(arguments)
    model = read_model(spec.model)
    training, held_out = load_data(spec, model)
    samples = held_out if len(held_out) else training
    link = make_link(spec, model, None)
    link.connect()
    with tempfile.TemporaryDirectory() as folder:
        result = BoardTrainer(link, model, training, spec.settings, Path(folder), lambda event: None).evaluate(samples)
    link.close()
    if arguments.json:
        show_json({"accuracy": result.accuracy, "loss": result.loss, "samples": result.samples})
    else:
        print(f"accuracy {result.accuracy:.1%}, loss {result.loss:.3f} on {result.samples:,} samples")
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    """Show a board's counters."""
    from agent.cli.mcu_views import show_status, status_json
    from agent.mcu.protocol.link import Link
    from agent.mcu.protocol.ports import PortSelector

    link = Link(PortSelector(path=arguments.port, serial=arguments.serial))
    device = link.connect()
    while True:
        status, pages = device.status(), device.pages()
        if arguments.json:
            print(json.dumps(status_json(device.info, status, pages)), flush=True)
        else:
            show_status(device.info, status, pages)
        if not arguments.follow:
            link.close()
            return 0
        time.sleep(1.0)


def run_record(arguments: argparse.Namespace) -> int:
    """Record a stream until it ends or Ctrl-C."""
    from dataclasses import asdict

    from agent.mcu.model import read_model
    from agent.mcu.stream import Recorded, open_stream, record

    def report(seen: Recorded) -> None:
        if arguments.json:
            print(json.dumps(asdict(seen)), flush=True)
        else:
            print(f"{seen.samples:,} samples in {seen.files} files, {seen.bad_lines} bad lines", flush=True)

    with open_stream(arguments.source) as stream:
        record(stream, arguments.inbox, read_model(arguments.model), arguments.per_file, report)
    return 0


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run a model in QEMU until interrupted, or adapt a project from start to finish."""
    from agent.mcu.project import SCRIPT

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the simulated board is switched off
    if (arguments.model / SCRIPT).is_file():
        return _simulate_project(arguments)
    with tempfile.TemporaryDirectory() as work, _simulator(arguments.model, arguments.board, Path(work)) as simulator:
        port = simulator.start()
        if arguments.json:
            print(json.dumps({"port": str(port), "board": simulator.firmware.board.name}), flush=True)
        else:
            print(f"{simulator.firmware.board.title} on {port}; Ctrl-C ends it. In another terminal:")
            print(f"  port-agent mcu train {arguments.model} --data DATA --port {port}", flush=True)
        _wait_for_interrupt(simulator)
    return 0


def _simulator(model: Path, board: str | None, work: Path) -> "Simulator":
    from agent.mcu.board.catalogue import find_board
    from agent.mcu.board.firmware import build_firmware
    from agent.mcu.board.simulate import Simulator
    from agent.mcu.job import DEFAULT_SIMULATED, read_job
    from agent.mcu.protocol.ports import simulator_folder

    chosen = find_board(board or read_job(model).board or DEFAULT_SIMULATED)
    return Simulator(build_firmware(chosen, model, work), simulator_folder() / f"{chosen.name}-{model.resolve().name}")


def _wait_for_interrupt(simulator: "Simulator") -> None:
    ended = threading.Event()
    while simulator.running and not ended.wait(1.0):
        pass


def _simulate_project(arguments: argparse.Namespace) -> int:
    from agent.cli.mcu_views import show_firmware
    from agent.mcu.job import read_job
    from agent.mcu.project import load_project, write_project

    project = load_project(arguments.model)
    if project.note and not arguments.json:
        print(project.note)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        spec = read_job(write_project(project, work / "model"))
        with _simulator(work / "model", arguments.board, work / "firmware") as simulator:
            if not arguments.json:
                show_firmware(simulator.firmware)
            return _train(spec, work / "state", arguments.json, simulator.start())
