"""`mcu compile`: what is chosen is written, and said."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from port_agent.cli import main
from port_planner.mcu.schemes.rate import RATES
from tests.agent.cli.mcu.command import run_json

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "imu_gestures"


UNTRAINED = """
import numpy as np
import torch

from port_agent.mcu.project import Project
from port_planner.mcu import compile_model
from port_planner.mcu.zoo import DigitsNet


def make_project():
    torch.manual_seed(0)
    x, y = np.random.default_rng(0).random((8, 1, 8, 8), np.float32), np.arange(8)
    return Project(compile_model(DigitsNet().eval(), x, name="digits", simd=False), x, y, x, y, board="qemu-m0")
"""


@pytest.mark.long
def test_compile_finds_what_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = run_json(capsys, "compile", str(EXAMPLE), "--sparse-update", "4K", "-o", str(tmp_path / "model"))
    scheme = found["scheme"]
    assert scheme["ram_bytes"] == found["arena_bytes"] + found["parameter_bytes"] <= 4096
    assert scheme["proven"] and scheme["measured"] > scheme["untrained"]
    assert (tmp_path / "model" / "model.c").is_file()
    assert main(["mcu", "compile", str(EXAMPLE), "--sparse-update", "500", "-o", str(tmp_path / "none")]) == 2
    assert "500" in capsys.readouterr().err


@pytest.mark.process
def test_compile_gives_weights_a_low_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out")]
    (plain,) = run_json(capsys, *words)
    (wide,) = run_json(capsys, *words, "--q88")
    assert wide["parameter_bytes"] == plain["parameter_bytes"] + 2432  # weights of the digits net
    assert json.loads((tmp_path / "out" / "job.json").read_text())["settings"]["rule"] == "q88"
    (valued,) = run_json(capsys, *words, "--q88", "--ram", "9K", "--page", "psram", "--per-joule")
    assert valued["plan"]["ram_bytes"] <= 9216


@pytest.mark.process
def test_compile_reports_each_layer_and_chooses_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--report", "--choose-rate"]
    (found,) = run_json(capsys, *words)
    assert 0 < found["int8_error"] < 0.5 and found["clipped_values"] == 0
    rates = found["learning_rate"]
    assert rates["chosen"] in [each["rate"] for each in rates["measured"]]
    assert json.loads((tmp_path / "out" / "job.json").read_text())["settings"]["learning_rate"] == rates["chosen"]
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == found["layers"]
    assert set(found["layers"][0]["costs"]) == {"mkr1000", "nrf52840"}
    assert main(["mcu", *words]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
    assert "on held-out samples" in said and "clipped" in said and page.count("<tr>") == 1 + len(found["layers"])


@pytest.mark.process
def test_compile_gives_weights_room_to_grow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out")]
    run_json(capsys, *words)
    scales = load_file(tmp_path / "out" / "layers.safetensors")
    run_json(capsys, *words, "--growth", "5")
    for name, wide in load_file(tmp_path / "out" / "layers.safetensors").items():
        if name.endswith("/scale"):
            np.testing.assert_allclose(wide, 4 * scales[name], rtol=1e-5)  # 1.25 times without
    (found,) = run_json(capsys, *words, "--choose-rate")
    assert found["learning_rate"]["weights_at_limit"]["features_0_0"] == 0
    assert main(["mcu", *words, "--growth", "0.5"]) == 1
    assert main(["mcu", *words, "--growth", "2", "--inference"]) == 2
    assert "--growth" in capsys.readouterr().err


@pytest.mark.process
def test_a_rate_that_nobody_named_is_measured_where_there_are_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out")]
    (tmp_path / "project.py").write_text(
        UNTRAINED.replace("(8, 1, 8, 8)", "(30, 1, 8, 8)").replace("np.arange(8)", "np.arange(30) % 8")
    )
    (found,) = run_json(capsys, *words)
    assert (rate := found["learning_rate"]["chosen"]) in RATES
    assert json.loads((tmp_path / "out" / "job.json").read_text())["settings"] == {"learning_rate": rate}
    (unmeasured,) = run_json(capsys, *words, "--no-choose-rate")
    assert "learning_rate" not in unmeasured and main(["mcu", *words, "--no-choose-rate"]) == 0
    said = capsys.readouterr().out
    assert (
        "learning rate 0.03 by default, not measured on your samples" in said
        and "this is a different model" not in said
    )
    (tmp_path / "project.py").write_text(UNTRAINED)
    assert "learning_rate" not in run_json(capsys, *words)[0]


@pytest.mark.slow
def test_compile_gives_low_bytes_to_as_many_layers_as_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--q88", "--ram"]
    (plain,) = run_json(capsys, *words[:4])
    needed = plain["arena_bytes"] + plain["parameter_bytes"]
    (whole,) = run_json(capsys, *words, str(needed + 2432))
    assert whole["without_low_bytes"] == []
    assert main(["mcu", *words, "6000", "--page", "psram"]) == 0
    said = capsys.readouterr().out
    assert "low bytes do not fit for " in said and "6,000 B" not in said
    (some,) = run_json(capsys, *words, "6000", "--page", "psram")
    assert len(some["without_low_bytes"]) == said.split("low bytes do not fit")[1].split(";")[0].count(",") + 1
    assert some["plan"]["ram_bytes"] <= 6000


@pytest.mark.process
def test_compile_chooses_by_accuracy_per_joule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--per-joule"]
    (found,) = run_json(capsys, *words, "--ram", "7000", "--page", "psram")
    chosen = found["per_joule"]
    assert chosen["chosen"] in [candidate["origin"] for candidate in chosen["candidates"]]
    assert found["plan"]["ram_bytes"] <= 7000
    assert main(["mcu", *words, "--ram", "7000", "--page", "psram"]) == 0
    assert "chosen: " + chosen["chosen"] in (shown := capsys.readouterr().out) and "one standard error" in shown
    assert main(["mcu", *words]) == 2 and "give --ram too" in capsys.readouterr().err
    assert main(["mcu", *words, "--ram", "9K", "--dynamic-update", "0.5"]) == 2
    assert "give one of them" in capsys.readouterr().err


@pytest.mark.slow
def test_compile_chooses_channels_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    words = ["compile", str(tmp_path), "-o", str(tmp_path / "out"), "--dynamic-update", "0.25"]
    (chosen,) = run_json(capsys, *words)
    needed = chosen["arena_bytes"] + chosen["parameter_bytes"]
    (paged,) = run_json(capsys, *words, "--ram", str(needed - 2000), "--page", "psram")
    plan = paged["plan"]
    assert plan["ram_bytes"] <= needed - 2000 and plan["medium"] == "psram" and plan["paged"] > 0 == plan["banded"]
    assert plan["written_bytes"] > 0 and "largest gradients" in (tmp_path / "out" / "model.c").read_text()
    assert main(["mcu", *words[:4], "--dynamic-update", "2"]) == 1 and "up to 1" in capsys.readouterr().err
    assert main(["mcu", *words[:4], "--page", "sd"]) == 2 and "give --ram too" in capsys.readouterr().err
    assert main(["mcu", *words, "--ram", str(needed - 2000), "--page", "psram"]) == 0
    said = capsys.readouterr().out
    assert "pages read" in said and "two copies of the trained parameters" in said and "written per sample" in said


@pytest.mark.slow
def test_compile_plans_for_less_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(UNTRAINED)
    (kept,) = run_json(capsys, "compile", str(tmp_path), "-o", str(tmp_path / "kept"))
    needed = kept["arena_bytes"] + kept["parameter_bytes"]
    words = ["mcu", "compile", str(tmp_path), "-o", str(tmp_path / "less")]
    (less,) = run_json(capsys, *words[1:], "--ram", str(needed - 1600))
    assert less["plan"]["ram_bytes"] <= needed - 1600 and less["plan"]["banded"] > 0 and less["plan"]["overhead"] > 0
    assert main([*words, "--ram", str(needed), "--deadline", "1ms"]) == 2
    assert "the deadline is 0.001 s" in capsys.readouterr().err
    assert main([*words, "--deadline", "50ms"]) == 2 and "give --ram too" in capsys.readouterr().err
    assert main([*words, "--ram", "4000"]) == 2 and "the least found is" in capsys.readouterr().err
    assert main([*words, "--ram", "1K"]) == 2 and "No plan takes less than the 2984 B of" in capsys.readouterr().err
