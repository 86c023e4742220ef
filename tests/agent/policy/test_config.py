"""Configuration files: defaults, drop-ins, and refusals with file, line and reason."""

import re
from dataclasses import fields, replace
from datetime import time
from pathlib import Path

import pytest

from port_agent.energy.sources.registry import EnergyConfig
from port_agent.facts import Power
from port_agent.policy.config import KEYS, Config, ConfigError, describe_config, load_config, read_file, restart_needed
from port_agent.policy.decide import Policy, ResourceLimits, TimeWindow

EXAMPLE = Path(__file__).resolve().parents[3] / "deploy/config.toml"


def write(directory: Path, text: str, name: str = "config.toml") -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_no_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_config(tmp_path / "config.toml") == Config()
    assert load_config(None).policy == Policy()


def test_the_shipped_example_changes_nothing_and_shows_every_default(tmp_path: Path) -> None:
    assert read_file(EXAMPLE) == Config()
    text = re.sub(r"^# (\w+ = |\[energy)", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^(every|sat|sun) = .*$", "", text, flags=re.MULTILINE)
    shown = read_file(write(tmp_path, text))
    assert replace(shown, energy={}) == Config()
    assert set(shown.energy) == {item.name for item in fields(EnergyConfig)}, "[energy] has examples, not only defaults"
    names = {key.rpartition(".")[2] for key in KEYS} - {"proc_root", "dev_root"}
    assert names <= set(re.findall(r"^(\w+) = ", text, flags=re.MULTILINE))


def test_values_reach_the_policy(tmp_path: Path) -> None:
    text = """
[when]
external_power = false
assume_power = "battery"
idle_for = "90s"
max_temperature = 80
[windows]
every = ["22:00-07:00"]
sun = ["00:00-24:00"]
[limits.in_use]
memory = "300M"
cpu = 10
[storage]
flash_writes_per_day = "1G"
[metrics]
listen = "127.0.0.1:9477"
"""
    config = load_config(write(tmp_path, text))
    policy = config.policy
    assert policy.require_external_power is False
    assert policy.assume_power is Power.BATTERY
    assert policy.idle_for_s == 90.0
    assert policy.max_temperature_c == 80.0
    assert len(policy.windows) == 8
    assert policy.windows[-1] == TimeWindow(6, time(0), time(0))
    assert policy.in_use == ResourceLimits(10.0, 100.0, 300 << 20)
    assert policy.flash_write_budget_bytes_per_day == 1 << 30
    assert config.options.metrics_listen == ("127.0.0.1", 9477)
    assert describe_config(config)["windows"] is not None


def test_drop_ins_come_later_in_order_of_name(tmp_path: Path) -> None:
    main = write(tmp_path, "[when]\nidle_for = 10\nmin_battery = 50\n")
    write(tmp_path, "[when]\nidle_for = 30\n", "config.d/20-late.toml")
    write(tmp_path, "[when]\nidle_for = 20\n", "config.d/10-early.toml")
    config = load_config(main)
    assert (config.policy.idle_for_s, config.policy.min_battery_percent) == (30.0, 50.0)
    assert [file.name for file in config.files] == ["config.toml", "10-early.toml", "20-late.toml"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[when]\n\nidle_for = 'soon'\n", 3, "when.idle_for: 'soon' is not a valid duration"),
        ("[when]\nidle_fro = '5min'\n", 2, "did you mean when.idle_for?"),
        ("[when]\nidle_for = \n", 2, "Invalid value"),
        ("[when]\nmin_battery = 130\n", 2, "not between 0 and 100 percent"),
        ("[when]\nmin_battery = true\n", 2, "True is not between"),
        ("[when]\nexternal_power = 'yes'\n", 2, "neither true nor false"),
        ("[when]\nassume_power = 'solar'\n", 2, "not one of"),
        ("[when]\nresume_temperature = 75\n", 2, "must be below when.max_temperature (75 against 75 °C)"),
        ("[when]\nmax_temperature = 60\n", 2, "must be below"),
        ("# x\n[windows]\nmon = ['22-7']\n", 3, "write it like"),
        ("[windows]\nfunday = ['22:00-07:00']\n", 2, "not a day"),
        ("[windows]\nmon = ['25:00-07:00']\n", 2, "not a valid time span"),
        ("windows = 3\n", 1, "no such setting"),
        ("[limits]\n[limits.in_use]\nmemory = '130%'\n", 3, "between 0 and 100 percent"),
        ("[limits.in_use]\nmemory = 'lots'\n", 2, "cannot read the size"),
        ("[metrics]\nlisten = '0.0.0.0:80'\n", 2, "no local address"),
        ("[storage]\nkeep_jobs = 0\n", 2, "whole number between 1"),
        ("[sensors]\nsysfs_root = 'sys'\n", 2, "not an absolute path"),
        ("[energy]\nsolar = true\n", 2, "solar"),
        ("when.idle_for = -1\n", 1, "not between 0 and ten years"),
        ("when.idle_for = '99999999d'\n", 1, "not between 0 and ten years; write it like"),
        (f"when.idle_for = {10**400}\n", 1, "not between 0 and ten years"),
        (f"when.idle_for = {'9' * 5000}\n", None, "thousands of digits"),
        ("storage.min_free = '-5'\n", 1, "is negative; write it like"),
    ],
)
def test_refusals_name_file_line_and_reason(tmp_path: Path, text: str, line: int | None, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert (caught.value.file, caught.value.line) == (path, line)
    assert words in caught.value.reason
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")


def test_a_bad_drop_in_is_named(tmp_path: Path) -> None:
    main = write(tmp_path, "")
    bad = write(tmp_path, "[when]\nidle_for = []\n", "config.d/50-mine.toml")
    with pytest.raises(ConfigError) as caught:
        load_config(main)
    assert caught.value.file == bad


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe[when]")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(path)


def test_what_needs_a_restart_is_named(tmp_path: Path) -> None:
    old = read_file(write(tmp_path, "[when]\nidle_for = 1\n"))
    new = read_file(write(tmp_path, "[when]\nidle_for = 2\n[metrics]\nlisten = 'localhost:9477'\n"))
    assert restart_needed(old, new) == ["metrics.listen"]
    assert restart_needed(old, old) == []
