"""The program that the daemon starts for a fine-tuning:
`python -m port_agent.finetuning.job.start --bundle JOB ... --control-fd N`.

If it has root's rights, it takes those of the user who submitted the job. Then it becomes the training process inside
its budget, as `exec` does. By then only our own code has run, and none of the user's files was opened. Torch-free.
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
from port_agent.intercept.exec.exec_budget import ExecMemory, ExecOptions
from port_agent.intercept.exec.launch import LaunchOptions, launch_words
from port_agent.system.python_process import few_kernels_environment, threads_environment
from port_agent.worker.serve import serve
from port_agent.worker.worker_options import FinetuneWorkerOptions
from port_planner.base.errors import ExitCode


def main(words: Sequence[str] | None = None) -> ExitCode:
    """Become the worker; if that is impossible, report why to the daemon and return the exit code."""
    options = FinetuneWorkerOptions.parse(words, program="port_agent.finetuning.job.start")
    return serve(options.control_fd, lambda control, emit: _become_worker(options))


def _become_worker(options: FinetuneWorkerOptions) -> NoReturn:
    """Become the worker. Raises FinetuneError and OSError if that is impossible."""
    job = FinetuneJob.read(options.bundle)
    given = open_round(options)
    home = _take_rights_of(options.user) if options.user is not None and os.geteuid() == 0 else {}
    memory, page_dir = ExecMemory.of_this_machine(), Path(job.page_dir)
    added = memory.environment(page_dir, ram_bytes=job.ram_bytes)
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    budget = ExecOptions(
        ram_bytes=job.ram_bytes,
        tensors_bytes=None,
        page_dir=job.page_dir,
        read_bytes_per_s=None,
        write_bytes_per_s=None,
        step_deadline_s=None,
        writes_per_step=None,
        report=None,
        wear_joules=wear_joules_per_byte(page_dir),
        data_limited=soft != resource.RLIM_INFINITY,
        memory=memory,
    )
    restored = {name: os.environ.get(name) for name in added}
    files = () if given is None else (given.encoded(),)
    program = (
        "port_agent.finetuning.job.finetune_worker",
        job.encoded().decode(),
        "--control-fd",
        str(options.control_fd),
        *files,
    )
    command = launch_words(LaunchOptions(asdict(budget), True, restored, ours=True), program)
    os.execve(
        command[0],
        command,
        {**os.environ, **home, **added, **threads_environment(job.threads), **few_kernels_environment()},
    )


def _take_rights_of(user: str) -> dict[str, str]:
    """Give up root's rights for a user's permanently; return the changes to the environment.

    Raises FinetuneError, OSError.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise FinetuneError(f"user {user}, who submitted the job, no longer exists; submit the job again") from error
    os.initgroups(entry.pw_name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    return {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}


if __name__ == "__main__":
    raise SystemExit(main())
