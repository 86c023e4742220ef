"""`exec`: run an unchanged program within a memory budget.

This process checks its arguments, sets the limits and becomes the program (execve), so signals, exit code, terminal and
process id are the program's own. Then `port_agent.intercept.exec.launch` runs inside the program.
"""

import argparse
import os
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from port_agent.cli.arguments import UsageError, duration, readable_file, size, use_cores, whole_number, writable_file
from port_agent.control import places
from port_agent.control.client import ControlError
from port_agent.energy.media import FlashPrices
from port_agent.guard import ProcessTable
from port_agent.intercept.consumption import wear_joules_per_byte
from port_agent.intercept.exec.exec_budget import ExecMemory, ExecOptions
from port_agent.intercept.exec.launch import LaunchOptions, accounting_words, launch_words
from port_agent.jobs.job import name_like
from port_agent.malloc import PreloadMode, preload_mode, preload_trouble
from port_agent.paging.page_space import PageSpace, check_not_in_ram, default_page_dir
from port_agent.paging.pager import PageError
from port_agent.supervisor.job.plan_choice import data_limit, memory_max
from port_agent.system.memory_limit import limit_data, scope_command

_AGENT_PATIENCE_S, _AGENT_RETRY_S = 15.0, 0.5
"""Seconds to wait for an agent that is being restarted, and between tries; it answers again within seconds."""

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")

_EPILOG = """\
what it does: every operator of the program runs as the program calls it, on the same values. Tensors that the next
operators do not need are written to a page file or recomputed later. Numbers, saved files, output and exit code are those of
the program without a budget. The program stays unchanged, and its first step already runs inside the budget.

examples:
  port-agent exec --ram 600M -- train.py --epochs 3
  port-agent exec --ram 2G --page-dir /mnt/ssd -- -m my_package.train --config base.yaml
  port-agent exec --ram 600M --opportunistic -- train.py
  port-agent exec --tensors 4K -- train.py            a test of the program: every tensor is evicted after each operator

--opportunistic: the program attaches to the agent of this machine and runs when the agent's policy allows it (charging, idle,
in its time window), one job at a time. Otherwise it waits between two operators; inside a long operator or other code, it
waits where it touches a tensor. Its tensors then go to the page file; Python, torch and the program's own objects stay.
`port-agent status` and `port-agent job pause`, `resume` and `cancel` know it by its name;
`job cancel` has the effect of Ctrl-C. The program also waits while no agent answers.

how much to give: Python and torch alone take about 230 MiB, transformers 100 MiB more. The budget cannot be below that plus
what the largest operator reads and writes. An operator that does not fit is named with its bytes and its line. Give
--ram a little less than what the machine can spare: the kernel enforces a hard limit a little above it.

how it is exact: tensors keep their addresses, and the processor's memory protection brings back an evicted tensor that is
touched. So code outside of PyTorch's operators (C++ extensions, torch.compile, undeclared writes, pointers that are kept) finds
the same contents as without a budget. Operators are intercepted once tensors come near the limit, to read ahead, write early
and recompute. A tensor that was dropped to be recomputed has no contents in the meantime. If anything except an operator touches
it, the program ends with an error; --no-recompute pages such tensors instead. --guard-only intercepts no operators; it is
slower if many tensors are evicted. Needs Linux with glibc.

child processes share the same budget: torchrun and accelerate launch, DataLoader workers, programs that the program
starts or becomes. Memory protection alone limits them. A program that cannot be guarded, such as a statically linked one, is
reported with its peak, without a claim about the budget. With --opportunistic, children are stopped (SIGSTOP) while the
program waits; their memory stays.
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `exec` to `commands`."""
    parser = commands.add_parser(
        "exec",
        help="run a training program, unchanged, inside a memory budget",
        usage="port-agent exec (--ram SIZE | --tensors SIZE | --gpu-ram SIZE) [options] -- (SCRIPT | -m MODULE) "
        "[ARGUMENT ...]",
        description="Run a PyTorch program as it is, inside a memory budget.",
        epilog=_EPILOG,
    )
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--ram", type=size, metavar="SIZE", help="memory of the whole process, e.g. 600M or 1.5G")
    bound.add_argument(
        "--tensors",
        type=size,
        metavar="SIZE",
        help="memory of the tensors alone; the rest of the process is not counted",
    )
    add_budget_options(parser)
    advice = parser.add_mutually_exclusive_group()
    advice.add_argument(
        "--no-recompute", action="store_true", help="page every evicted tensor; never recompute one instead"
    )
    advice.add_argument(
        "--guard-only",
        action="store_true",
        help="intercept no operators; memory protection alone decides what is resident",
    )
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument(
        "--gpu-ram",
        type=size,
        metavar="SIZE",
        help="memory that the process may take on the first GPU, e.g. 6G; alone or with --ram",
    )
    gpu.add_argument(
        "--gpu-tensors",
        type=size,
        metavar="SIZE",
        help="memory that tensors may take on the first GPU; the rest of the process is not counted",
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="the program and its own arguments"
    )
    parser.set_defaults(run=_exec)


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for how a budget is kept; the size of the budget is a separate option."""
    parser.add_argument(
        "--page-dir",
        type=Path,
        metavar="DIR",
        default=default_page_dir(),
        help="directory for evicted tensors, on a disk, not in RAM (default: %(default)s)",
    )
    parser.add_argument(
        "--cpus", type=whole_number(1), metavar="N", help="run on N CPUs, one thread each (default: as without exec)"
    )
    parser.add_argument(
        "--report", type=writable_file, metavar="FILE", help="write memory, time and traffic as JSON at the end"
    )
    parser.add_argument(
        "--read-limit",
        type=size,
        metavar="SIZE",
        help="read pages no faster than this, in bytes per second, to try a slow medium",
    )
    parser.add_argument(
        "--write-limit", type=size, metavar="SIZE", help="write pages no faster than this, in bytes per second"
    )
    parser.add_argument(
        "--step-deadline", type=duration, metavar="TIME", help="plan a step that takes at most this long, e.g. 1.5s"
    )
    parser.add_argument(
        "--writes-per-step",
        type=size,
        metavar="SIZE",
        help="plan a step that writes at most this much, to reduce flash wear",
    )
    parser.add_argument(
        "--config",
        type=readable_file,
        metavar="FILE",
        help=f"configuration whose [energy] says what the flash endures and costs (default: {places.SYSTEM_CONFIG} if "
        "it exists)",
    )
    parser.add_argument(
        "--opportunistic",
        action="store_true",
        help="run while the agent's policy allows it; otherwise pause and release memory",
    )
    parser.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="with --opportunistic: where the agent's control socket is"
    )


def _exec(arguments: argparse.Namespace) -> NoReturn:
    """Become the program; raises UsageError."""
    if arguments.ram is arguments.tensors is arguments.gpu_ram is arguments.gpu_tensors is None:
        raise UsageError(
            "no budget; give --ram SIZE for the process, --tensors SIZE for its tensors, or --gpu-ram SIZE for a GPU"
        )
    if arguments.guard_only:
        _check_guard_only(arguments)
    _check_guard()
    module, program = _program(arguments.program)
    run_in_budget(arguments, program, module=module, name=Path(program[0]).stem)


def _check_guard_only(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that need interception of operators."""
    needing = {
        "--opportunistic": arguments.opportunistic,
        "--read-limit": arguments.read_limit,
        "--write-limit": arguments.write_limit,
        "--step-deadline": arguments.step_deadline,
        "--writes-per-step": arguments.writes_per_step,
        "--gpu-ram": arguments.gpu_ram,
        "--gpu-tensors": arguments.gpu_tensors,
    }
    given = [name for name, value in needing.items() if value]
    if given:
        raise UsageError(
            f"{' and '.join(given)}: these need operators to be intercepted, which --guard-only does not; leave one of "
            "them out"
        )


def _check_guard() -> None:
    """Raise UsageError if memory cannot be guarded."""
    if preload_mode() is not PreloadMode.PRELOAD:
        raise UsageError(
            f"exec: {preload_trouble() or preload_mode().value}; guarded memory, which keeps a program within its "
            "budget, is a library that is preloaded on Linux with glibc; install port-agent again with a C "
            "compiler, or use port_agent.budget in the program"
        )


def run_in_budget(
    arguments: argparse.Namespace,
    program: list[str],
    *,
    module: bool,
    name: str,
    ours: bool = False,
) -> NoReturn:
    """Become a program within the budget of `arguments`: a script or a module. `ours`: whether it is
    a module of this package.

    `arguments` have `ram`, `tensors` and the options that `add_budget_options` adds; `name` is what the agent shows.
    Raises UsageError, and ConfigError and EnergyConfigError for the settings.
    """
    ram = arguments.ram
    memory = ExecMemory.GUARD_ONLY if getattr(arguments, "guard_only", False) else ExecMemory.of_this_machine()
    check_page_dir(arguments.page_dir, for_ram=ram is not None)
    energy, _ = places.energy_settings(arguments.config)
    prices = FlashPrices(energy.flash_endurance_bytes, energy.flash_price, energy.price_per_kwh)
    socket = _agent_socket(arguments.runtime_dir, ram) if arguments.opportunistic else None
    page_dir = arguments.page_dir.absolute()
    added = memory.environment(page_dir, ram_bytes=ram, tensor_bytes=arguments.tensors)
    table = None
    if memory is not ExecMemory.RESIZED:
        table = ProcessTable.create(page_dir, " ".join(program), ram_bytes=ram, tensor_bytes=arguments.tensors)
        added |= table.environment()
    if arguments.cpus is not None:
        use_cores(arguments.cpus)
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(arguments.cpus)
    scope = scope_command(memory_max(ram)) if ram is not None else []
    budget = ExecOptions(
        ram_bytes=ram,
        tensors_bytes=arguments.tensors,
        page_dir=str(page_dir),
        read_bytes_per_s=arguments.read_limit,
        write_bytes_per_s=arguments.write_limit,
        step_deadline_s=arguments.step_deadline,
        writes_per_step=arguments.writes_per_step,
        wear_joules=wear_joules_per_byte(arguments.page_dir, prices),
        report=str(arguments.report.absolute()) if arguments.report is not None else None,
        data_limited=ram is not None and not scope,
        socket=str(socket) if socket is not None else None,
        name=name_like(name),
        memory=memory,
        recompute=not getattr(arguments, "no_recompute", False),
        processes=str(table.path) if table is not None else None,
        gpu_ram_bytes=getattr(arguments, "gpu_ram", None),
        gpu_tensors_bytes=getattr(arguments, "gpu_tensors", None),
    )
    options = LaunchOptions(asdict(budget), module, {name: os.environ.get(name) for name in added}, ours)
    if ram is not None and not scope:
        limit_data(data_limit(ram))
    if table is not None:
        table.account_by(accounting_words(options, program))
    words = launch_words(options, program)
    if scope:  # the command that starts the scope is not part of the program
        words = [*scope, "env", *(f"{name}={value}" for name, value in added.items()), *words]
        added = {}
    os.execve(words[0], words, {**os.environ, **added})


def _agent_socket(runtime_dir: Path | None, ram: int | None) -> Path:
    """Return the control socket of an agent that answers; raises UsageError, ControlError."""
    if ram is None:
        raise UsageError("--opportunistic needs --ram: the agent must know how much memory the program may take")
    client, end_s = places.connect(runtime_dir), time.monotonic() + _AGENT_PATIENCE_S
    waits = False
    while True:
        try:
            client.get("/v1/status")
        except ControlError as error:
            restarts = (
                error.is_absent and client.path.parent.is_dir()
            )  # systemd keeps the directory over a restart, but not over a stop
            if not restarts or time.monotonic() >= end_s:
                raise
            if not waits:
                waits = True
                print(f"port-agent: {error}; waiting {_AGENT_PATIENCE_S:.0f} s for it", file=sys.stderr)
            time.sleep(_AGENT_RETRY_S)
        else:
            return client.path.absolute()


def _program(words: list[str]) -> tuple[bool, list[str]]:
    """Return whether the program is a module, and the command's words without `-m`.

    Raises UsageError if there is no program.
    """
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise UsageError("no program; write it after --, as in: port-agent exec --ram 600M -- train.py --epochs 3")
    words = _without_python(words)
    if not words:
        raise UsageError("python alone is not a program; give a script, or -m and a module")
    if words[0] == "-m":
        if len(words) == 1:
            raise UsageError("-m needs the name of a module")
        return True, words[1:]
    script = Path(words[0])
    if words[0].startswith("-") and not script.exists():
        raise UsageError(f"{words[0]} is not a program; give a script, or -m and a module")
    try:
        script.open("rb").close()
    except IsADirectoryError:
        pass  # a directory with __main__.py
    except OSError as error:
        raise UsageError(f"cannot open {script}: {error.strerror}") from error
    return False, words


def _without_python(words: list[str]) -> list[str]:
    """Return a command without a leading interpreter if that is this interpreter.

    Raises UsageError if it may be another one.
    """
    first = Path(words[0])
    if not _PYTHON.fullmatch(first.name) or (first.parent == Path() and first.exists()):
        return words
    if first.parent not in (Path(), Path(sys.executable).parent):
        raise UsageError(
            f"{first} may be another Python than {sys.executable}, which runs the program; leave it out, or use the "
            "port-agent of that Python"
        )
    return words[1:]


def check_page_dir(directory: Path, *, for_ram: bool) -> None:
    """Raise UsageError unless pages can be kept in `directory`.

    It must be writable, have free space, and, for a budget of RAM, not be in RAM.
    """
    try:
        PageSpace(directory).close()
        if for_ram:
            check_not_in_ram(directory)
    except PageError as error:
        raise UsageError(str(error)) from error
