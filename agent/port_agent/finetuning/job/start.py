"""What the daemon starts for a fine-tuning: `python -m port_agent.finetuning.job.start --bundle JOB ... --control-fd N`.

It takes the rights of the user who submitted, where it has root's, and becomes the recipe inside its budget, as `exec` does.
Only our own code has run by then, and of the user's files none was opened. Torch-free.
"""

import os
import pwd
import resource
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.finetuning.round_files import open_round
from port_agent.intercept.consumption import wear_joules_per_byte
from port_agent.intercept.exec.exec_budget import ExecOptions
from port_agent.intercept.exec.launch import LaunchOptions, launch_words
from port_agent.malloc import preload_environment
from port_agent.system.python_process import few_kernels_environment, threads_environment
from port_agent.worker.options import FinetuneWorkerOptions
from port_agent.worker.serve import serve
from port_planner.base.errors import ExitCode


def main(words: Sequence[str] | None = None) -> ExitCode:
    """Become the worker; return the exit code where that is impossible, the daemon told why."""
    options = FinetuneWorkerOptions.parse(words, program="port_agent.finetuning.job.start")
    return serve(options.control_fd, lambda control, emit: _become_worker(options))


def _become_worker(options: FinetuneWorkerOptions) -> NoReturn:
    """Raise FinetuneError and OSError where that is impossible."""
    job = FinetuneJob.read(options.bundle)
    given = open_round(options)
    home = _take_rights_of(options.user) if options.user is not None and os.geteuid() == 0 else {}
    allocator = preload_environment(job.ram_bytes)
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    budget = ExecOptions(
        ram_bytes=job.ram_bytes, tensors_bytes=None, page_dir=job.page_dir, read_bytes_per_s=None, write_bytes_per_s=None,
        step_deadline_s=None, writes_per_step=None, report=None, wear_joules=wear_joules_per_byte(Path(job.page_dir)),
        data_limited=soft != resource.RLIM_INFINITY,
    )  # fmt: skip
    restored = {name: os.environ.get(name) for name in allocator}
    files = () if given is None else (given.encoded(),)
    program = (
        "port_agent.finetuning.job.worker",
        job.encoded().decode(),
        "--control-fd",
        str(options.control_fd),
        *files,
    )
    command = launch_words(LaunchOptions(asdict(budget), True, restored, ours=True), program)
    os.execve(
        command[0],
        command,
        {**os.environ, **home, **allocator, **threads_environment(job.threads), **few_kernels_environment()},
    )


def _take_rights_of(user: str) -> dict[str, str]:
    """Give up root's rights for a user's for good; return what changes in the environment. Raises FinetuneError, OSError."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise FinetuneError(f"user {user}, who submitted the job, is not there any more; submit it anew") from error
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    return {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}


if __name__ == "__main__":
    raise SystemExit(main())
