"""The command line and the environment of each kind of worker."""

from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.jobs.job import Job, JobKind, JobMeasurements, JobSpec
from port_agent.supervisor.job.plan_choice import (
    PlanFigures,
)
from port_agent.supervisor.job.worker_kinds import (
    DEFAULT_KINDS,
    BundleFacts,
    RunPaths,
    WorkerKind,
    checkpoint_steps,
    no_environment,
    no_facts,
    torch_environment,
    worker_command,
)

MIB = 1 << 20


FRONTIER = (
    PlanFigures(0, 900 * MIB, 1.0, 5.0),
    PlanFigures(1, 600 * MIB, 1.4, 6.0),
    PlanFigures(2, 400 * MIB, 2.5, 4.0),
)


def test_worker_command(tmp_path: Path) -> None:
    spec = JobSpec("birds", "bundle.port", epochs=3, arguments=("--board", "m0"))
    paths = RunPaths(tmp_path, tmp_path / "bundle.port")
    kind = WorkerKind(("python", "-m", "worker"), no_facts, no_environment)
    command = " ".join(worker_command(kind, Job(1, spec, 0.0), paths, 2, 7))
    state, out = tmp_path / "state", tmp_path / "out.safetensors"
    assert command == (
        f"python -m worker --bundle {tmp_path}/bundle.port --state-dir {state} --plan 2 --epochs 3 "
        f"--out {out} --checkpoint-every 7 --control-fd {{control_fd}} --board m0"
    )


def test_a_job_says_where_its_pages_go(tmp_path: Path) -> None:
    spec = JobSpec("birds", "bundle.port", page_dirs=("/mnt/card", "/mnt/stick"))
    kind = WorkerKind(("worker",), no_facts, no_environment)
    command = " ".join(worker_command(kind, Job(1, spec, 0.0), RunPaths(tmp_path, tmp_path / "bundle.port"), 0, None))
    assert " --page-dir /mnt/card --scratch-dirs /mnt/stick --control-fd " in command


def test_steps_between_checkpoints() -> None:
    job, budget = Job(1, JobSpec("birds", "bundle.port"), 0.0), 4096 * MIB
    assert checkpoint_steps(job, budget) == 50
    known = replace(job, measured=JobMeasurements(step_s=2.0, checkpoint_s=4.0, checkpoint_bytes=MIB))
    assert checkpoint_steps(known, budget) == 100
    assert checkpoint_steps(replace(job, spec=replace(job.spec, checkpoint_every=3)), budget) == 3
    assert checkpoint_steps(replace(job, spec=replace(job.spec, kind=JobKind.MCU)), budget) is None


@pytest.mark.process
def test_a_torch_worker_gets_its_allocator_and_its_threads() -> None:
    environment = torch_environment(BundleFacts(FRONTIER, threads=3), FRONTIER[0])
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert len(environment) > 2


def test_a_fine_tuning_has_its_budget_as_its_plan_and_runs_for_its_owner(tmp_path: Path) -> None:
    options = FinetuneOptions("/model", ("/data.jsonl",), "/out")
    job = FinetuneJob(options=options, ram_bytes=600 * MIB, threads=3, page_dir="/pages", weights={}, data_sha256="")
    (tmp_path / "bundle.port").write_bytes(job.encoded())
    kind = DEFAULT_KINDS[JobKind.FINETUNE]
    assert kind.read_bundle(tmp_path / "bundle.port") == BundleFacts((PlanFigures(0, 600 * MIB),), threads=3)
    spec = JobSpec("chats", "bundle.port", JobKind.FINETUNE, owner="ada")
    command = worker_command(kind, Job(1, spec, 0.0), RunPaths(tmp_path, tmp_path / "bundle.port"), 0, None)
    assert command[-4:] == ("--user", "ada", "--control-fd", "{control_fd}")


def test_a_fine_tuning_in_a_federation_trains_a_round_or_writes_what_was_averaged(tmp_path: Path) -> None:
    spec = JobSpec("chats", "bundle.port", JobKind.FINETUNE, federated=True, owner="ada")
    paths = RunPaths(tmp_path, tmp_path / "bundle.port", federation=tmp_path)
    kind = WorkerKind(("worker",), no_facts, no_environment)
    job = Job(1, spec, 0.0, rounds=4)
    command = " ".join(worker_command(kind, job, paths, 0, None))
    assert f" --weights {tmp_path}/model.safetensors " in command and "--round" not in command
    (tmp_path / "start.safetensors").touch()
    command = " ".join(worker_command(kind, job, paths, 0, None))
    assert (
        f" --out {tmp_path}/result.part --round 4 " in command
        and f" --weights {tmp_path}/start.safetensors " in command
    )
