"""What codecarbon and jetson-stats report, run on sensor trees that die on the way. Prints JSON.

Run it with the interpreter of a separate environment that has both installed:
`python -m venv other && other/bin/pip install codecarbon jetson-stats && other/bin/python benchmarks/energy_others.py`.
Their own reading code runs unchanged; only the place of the files differs.
"""

import importlib.metadata
import json
import logging
import os
import tempfile
import time
from pathlib import Path

SECONDS = 12
DEAD = range(5, 9)
"""Seconds during which the sensor's file is missing."""
WATTS = 10.0


def codecarbon_rapl(folder: Path) -> dict[str, object]:
    """Return what its RAPL reader reports of a steady 10 W whose counter vanishes for four of twelve seconds."""
    from codecarbon.core.cpu import IntelRAPL
    from codecarbon.core.units import Time

    zone = folder / "subsystem/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("262143328850\n")
    counter = zone / "energy_uj"
    counter.write_text("1000000000\n")
    reader = IntelRAPL(rapl_dir=str(folder / "subsystem"))
    joules, watts = 0.0, []
    for second in range(1, SECONDS + 1):
        if second in DEAD:
            counter.unlink(missing_ok=True)
        else:
            counter.write_text(f"{1000000000 + int(second * WATTS * 1e6)}\n")
        details = reader.get_cpu_details(Time.from_seconds(1))
        joules += sum(value for key, value in details.items() if "Energy" in key) * 3.6e6
        watts.append(sum(value for key, value in details.items() if "Power" in key))
    return {"joules": joules, "watts_while_dead": watts[DEAD.start - 1]}


def codecarbon_here() -> dict[str, object]:
    """Return what the whole tracker says about five busy seconds on this machine."""
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(
        country_iso_code="FRA", save_to_file=False, log_level="critical", measure_power_secs=1
    )
    tracker.start()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        sum(range(10000))
    tracker.stop()
    data = tracker.final_emissions_data
    return {"joules": data.energy_consumed * 3.6e6, "cpu_watts": data.cpu_power, "cpu_model": data.cpu_model}


def _jetson_tree(folder: Path, rails: dict[str, tuple[int, int]]) -> Path:
    device = folder / "1-0040"
    hwmon = device / "hwmon/hwmon2"
    hwmon.mkdir(parents=True)
    (device / "name").write_text("ina3221\n")
    for number, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        (hwmon / f"in{number}_label").write_text(f"{label}\n")
        (hwmon / f"in{number}_input").write_text(f"{millivolts}\n")
        (hwmon / f"curr{number}_input").write_text(f"{milliamperes}\n")
    return hwmon


def jetson_stats(folder: Path, rails: dict[str, tuple[int, int]], dying: int) -> dict[str, object]:
    """Return the board total that its power service shows before and after one channel's current file vanishes."""
    from jtop.core.power import PowerService, find_all_i2c_power_monitor

    hwmon = _jetson_tree(folder, rails)
    service = PowerService.__new__(PowerService)
    service._power_sensor, service._power_avg = find_all_i2c_power_monitor(str(folder)), {}
    before = service.get_status()["tot"]
    (hwmon / f"curr{dying}_input").unlink()
    after = service.get_status()["tot"]
    return {"milliwatts_before": before["power"], "milliwatts_after": after["power"]}


def main() -> None:
    """Run all and print one JSON object."""
    logging.disable(logging.CRITICAL)
    os.environ["CODECARBON_ALLOW_MULTIPLE_RUNS"] = "True"
    nano = {"VDD_IN": (4960, 960), "VDD_CPU_GPU_CV": (4960, 104), "VDD_SOC": (4960, 288)}
    agx = {"VDD_GPU_SOC": (19200, 144), "VDD_CPU_CV": (19200, 40), "VIN_SYS_5V0": (4984, 664)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "codecarbon": importlib.metadata.version("codecarbon"),
            "jetson_stats": importlib.metadata.version("jetson-stats"),
            "codecarbon_rapl": codecarbon_rapl(folder / "rapl"),
            "jetson_stats_nano": jetson_stats(folder / "nano", nano, 1),
            "jetson_stats_agx": jetson_stats(folder / "agx", agx, 1),
            "codecarbon_here": codecarbon_here(),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
