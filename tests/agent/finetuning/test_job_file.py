"""A fine-tuning's file is read back or refused, names what changed since, and what the agent may not reach."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from tests.agent.finetuning.tiny_model import make_data, make_model


@pytest.fixture
def options(tmp_path: Path) -> FinetuneOptions:
    model, data = make_model(tmp_path / "model"), make_data(tmp_path / "data.jsonl")
    return FinetuneOptions(str(model), (str(data),), str(tmp_path / "out"), json=True)


@pytest.fixture
def job(options: FinetuneOptions, tmp_path: Path) -> FinetuneJob:
    return FinetuneJob.of(options, ram_bytes=600 << 20, threads=2, page_dir=tmp_path)


def test_it_is_read_as_it_was_written(job: FinetuneJob, options: FinetuneOptions, tmp_path: Path) -> None:
    path = tmp_path / "bundle.port"
    path.write_bytes(job.encoded())
    assert FinetuneJob.read(path) == job
    assert job.options == replace(options, json=False, overwrite=True) and job.threads == 2
    job.check_files()
    os.utime(options.data[0])  # the same bytes
    job.check_files()


def other_weights(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (other_weights, r"model/model\.safetensors has changed since the job was submitted"),
    "data": (lambda f: (f / "data.jsonl").write_text('{"text": "x"}'), r"data\.jsonl has changed since the job was"),
    "no data": (lambda f: (f / "data.jsonl").unlink(), r"data\.jsonl: No such file"),
    "no model": (lambda f: (f / "model" / "config.json").unlink(), r"config\.json: No such file"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changed_is_named(what: str, job: FinetuneJob, tmp_path: Path) -> None:
    change, message = CHANGES[what]
    change(tmp_path)
    with pytest.raises(FinetuneError, match=message):
        job.check_files()


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda fields: {key: value for key, value in fields.items() if key != name}


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no options": without("options"),
    "no memory": lambda fields: fields | {"ram_bytes": 0},
    "no threads": lambda fields: fields | {"threads": -1},
    "a list": lambda fields: [fields],
    "a relative path": lambda fields: fields | {"page_dir": "pages"},
    "a path with an end in it": lambda fields: fields | {"page_dir": "/tmp\0x"},
    "text for a number": lambda fields: fields | {"options": fields["options"] | {"batch": "1"}},
    "a bundle of 2 MB": lambda fields: fields | {"page_dir": "/" + "x" * (2 << 20)},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_none_is_refused(what: str, job: FinetuneJob, tmp_path: Path) -> None:
    path = tmp_path / "bundle.port"
    path.write_text(json.dumps(HOSTILE[what](msgspec.to_builtins(job))))
    with pytest.raises(FinetuneError, match=r"submit it with `port-agent finetune --submit`"):
        FinetuneJob.read(path)


def test_what_may_not_be_read_or_written_is_named(job: FinetuneJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.check_reachable("user x")
    for closed, message in (
        (job.options.data[0], r"user x cannot read .*data\.jsonl; grant it permission"),
        (str(Path(job.options.model) / "model.safetensors"), r"user x cannot read .*model\.safetensors"),
        (job.page_dir, "user x cannot write to .*; grant it permission"),
    ):
        monkeypatch.setattr(os, "access", lambda path, mode, closed=closed: str(path) != closed)
        with pytest.raises(FinetuneError, match=message):
            job.check_reachable("user x")
