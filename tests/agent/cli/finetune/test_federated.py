"""`port-agent finetune --submit --federated`: three real agents average adapters; one is killed in
mid-round, and the one that leads.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from port_planner.base.units import format_bytes
from tests.agent.federate.agents import LEADER, Device, local_devices
from tests.agent.federate.jobs import needs_flower
from tests.agent.finetuning.tiny_model import TEXT, make_model
from tests.waiting import until

pytestmark = [needs_flower, pytest.mark.long]
ROUNDS, UPDATES, RAM_BYTES = 2, 40, 700 << 20
PATIENCE_S = 500.0


def submit(device: Device, model: Path) -> None:
    """Give a device its fine-tuning, of its own text, by the command."""
    data = device.root / "data.txt"
    data.write_text(" ".join(TEXT.split()[len(device.name) :] * 40))
    words = ["finetune", str(model), "--data", str(data), "--out", str(device.root / "out"), "--ram", str(RAM_BYTES)]
    words += [
        "--seq-len",
        "32",
        "--updates",
        str(UPDATES),
        "--lr",
        "0.01",
        "--cpus",
        "1",
        "--page-dir",
        str(device.root),
    ]
    words += ["--submit", "--federated", "--name", "gestures", "--runtime-dir", str(device.root / "run")]
    words += [] if device.name == LEADER else ["--leader", LEADER]
    done = subprocess.run([sys.executable, "-P", "-m", "port_agent.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    led = "port-agent peer federate start gestures" if device.name == LEADER else "attic leads them, with:"
    assert "waits for rounds" in done.stdout and led in done.stdout


def trains(device: Device, number: int) -> bool:
    """Return whether a device has done updates of a round."""
    job = device.job()
    return bool(job["state"] == "running" and job["step"] and job["rounds"] == number - 1)


def has_average(device: Device) -> bool:
    return device.job()["result"] is not None and device.job()["state"] == "waiting_data"


def test_adapters_federate_whatever_restarts(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", hidden_size=64)
    with local_devices(tmp_path, "attic", "cellar", "shed") as devices:
        attic, cellar, _ = devices
        for device in devices:
            submit(device, model)
        attic.lead(rounds=ROUNDS, min_devices=3, timeout_s=PATIENCE_S, min_share=1.0)
        until(lambda: trains(cellar, 1), attic.federation, patience_s=PATIENCE_S)
        cellar.kill()
        cellar.start()
        until(lambda: attic.federation()["done"] == 1 and trains(attic, 2), attic.federation, patience_s=PATIENCE_S)
        attic.kill()
        attic.start()
        until(lambda: attic.federation()["state"] == "finished", attic.federation, patience_s=PATIENCE_S)
        until(lambda: all(has_average(device) for device in devices), cellar.job, patience_s=PATIENCE_S)
        found = attic.federation()
        peaks = [device.job()["measured"]["peak_rss_bytes"] for device in devices]
        logs = [device.client.text("/v1/jobs/1/logs") for device in devices]
    averaged = safetensors.torch.load_file(Path(found["weights"]))
    for device, peak in zip(devices, peaks, strict=True):
        print(f"  {device.name}: worker {format_bytes(peak)} of {format_bytes(RAM_BYTES)}")
        own = safetensors.torch.load_file(device.root / "out" / "adapter_model.safetensors")
        assert own.keys() == averaged.keys() and all(torch.equal(own[name], averaged[name]) for name in own)
        assert {"adapter_config.json", "tokenizer.json"} <= {path.name for path in (device.root / "out").iterdir()}
        assert not (device.root / "out.state").exists()
    assert found["history"][-1]["loss"] < found["history"][0]["loss"] and all(peak <= RAM_BYTES for peak in peaks)
    assert all("with the averaged adapter" in log for log in logs)
