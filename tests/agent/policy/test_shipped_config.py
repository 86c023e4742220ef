"""The configuration file that is installed: with every comment taken away it is valid and says the defaults."""

import re
from dataclasses import replace
from pathlib import Path

from port_agent.energy.sources.registry import EnergyConfig
from port_agent.policy.config import Config, load_config

SHIPPED = Path(__file__).resolve().parents[3] / "deploy/config.toml"
_NO_DEFAULT = {
    "static_watts",
    "full_watts",
    "price_per_kwh",
    "currency",
    "co2_grams_per_kwh",
    "flash_endurance_bytes",
    "flash_price",
    "plugins",
}
"""Settings of [energy] that the file shows as examples."""


def uncommented(tmp_path: Path) -> Config:
    """Return the shipped configuration as it is with every setting and section switched on."""
    text = re.sub(r"(?m)^# (?=\w+ = |\[)", "", SHIPPED.read_text())
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(path)


def test_as_shipped_nothing_is_set() -> None:
    config = load_config(SHIPPED)
    assert (config.policy, config.options, dict(config.energy)) == (Config().policy, Config().options, {})


def test_every_line_shows_its_default(tmp_path: Path) -> None:
    config = uncommented(tmp_path)
    assert config.policy.windows, "they have no default: all times are allowed"
    assert replace(config.policy, windows=()) == Config().policy
    assert config.options == Config().options


def test_energy_block_holds_every_setting_of_the_meter(tmp_path: Path) -> None:
    table = uncommented(tmp_path).energy
    assert set(table) == set(EnergyConfig.__dataclass_fields__)
    energy = EnergyConfig.from_table(table)
    defaults = {name: getattr(EnergyConfig(), name) for name in _NO_DEFAULT}
    assert replace(energy, **defaults) == EnergyConfig()
    assert energy.plugins == {"tasmota": {"host": "192.168.1.40"}}
