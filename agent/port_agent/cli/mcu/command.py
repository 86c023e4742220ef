"""Commands of this area: microcontrollers on serial ports, and simulated ones."""

import argparse
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from port_agent.cli.arguments import (
    duration,
    positive_number,
    readable_file,
    readable_file_or_folder,
    readable_folder,
    size,
    whole_number,
    writable_file,
    writable_folder,
)

if TYPE_CHECKING:
    from port_agent.worker.shard import Shard

Adder = Callable[..., argparse.ArgumentParser]
Command = Callable[[argparse.Namespace], int]


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    mcu = commands.add_parser(
        "mcu",
        help="train int8 models on microcontrollers over a serial port",
        epilog="examples:\n"
        "  port-agent mcu simulate examples/imu_gestures         no board needed\n"
        "  port-agent mcu compile PROJECT -o build\n"
        "  port-agent mcu train build --epochs 3\n",
    )
    actions = mcu.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_list(actions.add_parser)
    _add_compile(actions.add_parser)
    _add_build(actions.add_parser)
    _add_flash(actions.add_parser)
    _add_library(actions.add_parser)
    _add_train(actions.add_parser)
    _add_eval(actions.add_parser)
    _add_infer(actions.add_parser)
    _add_export(actions.add_parser)
    _add_logs(actions.add_parser)
    _add_record(actions.add_parser)
    _add_simulate(actions.add_parser)


def _loaded_when_run(module: str, name: str) -> Command:
    """Return a command from a module of this directory, which is imported when the command runs."""

    def run(arguments: argparse.Namespace) -> int:
        command: Command = getattr(importlib.import_module(f"port_agent.cli.mcu.{module}"), name)
        return command(arguments)

    return run


def _add_list(add: Adder) -> None:
    parser = add("list", help="show boards on serial ports, their firmware and model")
    parser.add_argument("--port", help="also query this port (the system does not list ptys)")
    parser.add_argument(
        "--watch", action="store_true", help="keep running and report each board that is plugged in or out"
    )
    parser.add_argument("--boards", action="store_true", help="show the boards that firmware can be built for instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_loaded_when_run("boards", "run_list"))


def _add_compile(add: Adder) -> None:
    parser = add("compile", help="compile the PyTorch model of a project (project.py) to int8 tables")
    parser.add_argument("project", type=readable_folder, help="directory with project.py")
    parser.add_argument("-o", "--out", type=writable_folder, help="directory to write (default: PROJECT/build)")
    _add_variants(parser)
    parser.add_argument(
        "--sparse-update",
        type=size,
        metavar="RAM",
        help="choose which biases and weights are trained. Measures the gain of each on the project's training "
        "samples, finds the best sets whose arena and trained parameters fit in RAM, such as 12K. Takes the set that "
        "performs best in a training of its own",
    )
    parser.add_argument(
        "--dynamic-update",
        type=positive_number,
        metavar="SHARE",
        help="train in each step only this share of each layer's channels, such as 0.25: those with the largest "
        "gradients (groups of four); less work, but no tiles within --ram",
    )
    parser.add_argument(
        "--q88",
        action="store_true",
        help="give every trained weight a low byte and round to nearest, which ends nearer to fp32 than stochastic "
        "rounding of int8 but takes a byte more per trained weight; if that does not fit --ram, the layers with "
        "most weights have none",
    )
    parser.add_argument(
        "--ram",
        type=size,
        help="most memory for arena and trained parameters, such as 16K; tensors not kept between "
        "forward and backward pass are recomputed, with the same bits",
    )
    parser.add_argument(
        "--page",
        choices=["psram", "nor", "sd"],
        help="external memory that tensors may be paged to if that takes less energy than recomputing, or if nothing "
        "else frees the memory; psram also holds the trained parameters; needs --ram",
    )
    parser.add_argument(
        "--deadline",
        type=duration,
        metavar="TIME",
        help="reject a training step that takes longer per sample than this, such as "
        "50ms, by instruction counts and the board's file; needs --ram",
    )
    parser.add_argument(
        "--per-joule",
        action="store_true",
        help="choose between training less and recomputing or paging more. Plans for --ram the project's scheme (or "
        "the one --sparse-update finds), a quarter, half and three quarters of the layers, and everything; trains each "
        "on the project's samples in the host's engine; of the candidates within one standard error of the best "
        "accuracy, the one that gains most per joule is taken",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_loaded_when_run("compiling", "run_compile"))


def _add_variants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        type=readable_file,
        metavar="FILE",
        help="start from these weights: a file of mcu export, or a state_dict of the module as .safetensors",
    )
    parser.add_argument(
        "--inference",
        action="store_true",
        help="compile for inference only, which takes less RAM: a smaller board can use what another one learnt",
    )
    parser.add_argument(
        "--growth",
        type=positive_number,
        metavar="TIMES",
        help="leave room for weights and activations to become TIMES their largest value while they are trained, "
        "instead of 1.25 and 1.5 times: 8 for a module with random weights, whose weights have to grow",
    )
    parser.add_argument(
        "--choose-rate",
        action=argparse.BooleanOptionalAction,
        help="choose the learning rate: train at each of several on the project's samples in the host's engine, and "
        "take the one that recognises most of the samples held out; done by default if the project names no "
        "rate and it takes at most a minute",
    )
    parser.add_argument(
        "--report",
        action="store_true",
        help="report what each layer takes and how far its int8 values are from PyTorch's; also written as "
        "report.json and report.html",
    )


def _add_build(add: Adder) -> None:
    parser = add("build", help="build the firmware of a compiled model for a board")
    parser.add_argument("model", type=readable_folder, help="directory of a compiled model")
    parser.add_argument("--board", required=True, help="board name; see: port-agent mcu list --boards")
    parser.add_argument("-o", "--out", type=writable_folder, help="directory of the images (default: MODEL/firmware)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_loaded_when_run("boards", "run_build"))


def _add_flash(add: Adder) -> None:
    parser = add("flash", help="build the firmware of a model and write it to a board")
    parser.add_argument("model", type=readable_folder, help="directory of a compiled model")
    parser.add_argument("--board", required=True, help="board name; see: port-agent mcu list --boards")
    parser.add_argument("--port", help="serial port of the board")
    parser.add_argument("--drive", type=writable_folder, help="the boot loader's drive, where images are copied")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_loaded_when_run("boards", "run_flash"))


def _add_library(add: Adder) -> None:
    parser = add("library", help="write a model as a library for a program of your own, with an example")
    parser.add_argument("model", type=readable_folder, help="directory of a compiled model")
    parser.add_argument(
        "--for",
        dest="framework",
        required=True,
        choices=["arduino", "platformio", "zephyr", "pico-sdk", "esp-idf"],
        help="framework of the package",
    )
    parser.add_argument("-o", "--out", type=writable_folder, help="directory to write (default: MODEL/library)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_loaded_when_run("boards", "run_library"))


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
    parser.add_argument("--serial", help="USB serial number of the board: finds it after it is replugged")


def _add_train(add: Adder) -> None:
    parser = add("train", help="train the model on the board; interrupt it and run it again to continue")
    _add_job(parser)
    parser.add_argument("--epochs", type=whole_number(1), help="passes over the training data")
    parser.add_argument("--steps", type=whole_number(1), help="stop after this number of samples")
    parser.add_argument("--lr", type=positive_number, dest="learning_rate", help="learning rate (default 0.03)")
    parser.add_argument("--rule", choices=["stochastic", "nearest", "truncate", "q88"], help="rounding of the update")
    parser.add_argument(
        "--seed", type=whole_number(0, 2**32 - 1), help="seed of the order of samples and of rounding (default 1)"
    )
    parser.add_argument(
        "--snapshot-every", type=whole_number(1), help="samples between snapshots on the host (default 200)"
    )
    parser.add_argument(
        "--save-every",
        type=whole_number(1),
        help="samples between saves in the board's own flash, which wears; always saved at the end (default 20000)",
    )
    parser.add_argument(
        "--shard",
        type=_shard,
        metavar="K/N",
        help="train only part K of N of the samples, such as 2/3: several boards, each with a part and a --state-dir "
        "of its own, train every sample exactly once; it resumes only if its part is unchanged",
    )
    parser.add_argument("--state-dir", type=writable_folder, help="where snapshots are kept (default: beside the job)")
    parser.add_argument(
        "--keep-weights",
        action="store_true",
        help="start a new training, with other samples, seed or rate, from the weights of the newest snapshot in the "
        "state directory",
    )
    parser.add_argument("--out", type=writable_file, help="write the trained parameters here")
    parser.set_defaults(run=_loaded_when_run("training", "run_train"))


def _shard(text: str) -> "Shard":
    from port_agent.worker.shard import Shard

    try:
        return Shard.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_eval(add: Adder) -> None:
    parser = add("eval", help="measure accuracy and loss of the weights that are on the board now")
    _add_job(parser)
    parser.set_defaults(run=_loaded_when_run("training", "run_eval"))


def _add_infer(add: Adder) -> None:
    parser = add("infer", help="classify samples by the weights that are on the board now")
    parser.add_argument("model", type=readable_folder, help="directory of the compiled model")
    parser.add_argument(
        "--data", type=readable_file_or_folder, required=True, help=".npz or .safetensors file with x; y is not needed"
    )
    _add_port(parser)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=_loaded_when_run("training", "run_infer"))


def _add_export(add: Adder) -> None:
    parser = add(
        "export",
        help="write what a board learnt as a state_dict of the PyTorch module",
        description="Write what a board learnt as a state_dict by the names of the module's layers, which "
        "load_state_dict takes. The weights come from the newest snapshot of a training, from a file, or "
        "from a board.",
    )
    parser.add_argument("model", type=readable_folder, help="directory of the compiled model")
    parser.add_argument("-o", "--out", type=writable_file, required=True, help=".safetensors file to write")
    parser.add_argument(
        "--state-dir", type=readable_folder, help="the training's state directory (default: MODEL/state)"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="take the weights that recognised most of the samples held out, not the last ones",
    )
    parser.add_argument("--result", type=readable_file, help="take the file that mcu train --out wrote")
    parser.add_argument("--from-board", action="store_true", help="read the weights from the board")
    _add_port(parser)
    parser.add_argument(
        "--codes",
        action="store_true",
        help="write int8 codes and scales as they are on the board, batch norm folded in",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_loaded_when_run("exporting", "run_export"))


def _add_logs(add: Adder) -> None:
    parser = add(
        "logs",
        help="show a board's counters: frames, errors, steps, stack, resets",
        description="Show a board's counters: frames, errors, steps, stack, resets. A job in the agent's queue has a "
        "log of its own: port-agent job logs JOB.",
    )
    _add_port(parser)
    parser.add_argument("--follow", action="store_true", help="print again every second")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=_loaded_when_run("boards", "run_logs"))


def _add_record(add: Adder) -> None:
    parser = add("record", help="write a connected stream of samples into an inbox, for a job that waits for data")
    parser.add_argument("model", type=readable_folder, help="directory of the compiled model")
    parser.add_argument("--inbox", type=writable_folder, required=True, help="directory that the job reads")
    parser.add_argument(
        "--source",
        default="-",
        help='source of JSON lines with x and y: "-" (standard input), a path, or tcp:HOST:PORT',
    )
    parser.add_argument("--per-file", type=whole_number(1), default=64, help="samples per file (default 64)")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=_loaded_when_run("training", "run_record"))


def _add_simulate(add: Adder) -> None:
    parser = add("simulate", help="run the firmware without a board, in QEMU, on a real pty")
    parser.add_argument(
        "model",
        type=readable_folder,
        help="directory of a compiled model, or of a project, which is compiled and trained at once",
    )
    parser.add_argument("--board", help="qemu-m4f (default), qemu-m7f, qemu-m3, qemu-m0, qemu-m0-32k or posix")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=_loaded_when_run("training", "run_simulate"))
