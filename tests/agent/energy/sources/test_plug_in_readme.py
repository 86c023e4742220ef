"""The plug-in in the README runs as printed, against a socket that answers as Tasmota does."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import port_agent.energy
from port_agent.energy.sources.power_source import Coverage, PowerSource, SourceError
from port_agent.energy.sources.registry import EnergyConfig

README = (Path(port_agent.energy.__file__).parent / "README.md").read_text()


@pytest.fixture
def socket() -> Iterator[str]:
    """Give the address of a power socket that draws 23 W."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer `Status 8`."""
            body = json.dumps(
                {"StatusSNS": {"Time": "2026-11-21T04:00:00", "ENERGY": {"Power": 23, "Voltage": 231}}}
            ).encode()
            self.send_response(200 if self.path == "/cm?cmnd=Status%208" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            """Keep quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_plugin_of_the_readme(socket: str) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code
    namespace: dict[str, object] = {}
    exec(code[1], namespace)
    make = namespace["TasmotaSource"]
    assert callable(make)
    source: PowerSource = make({"host": socket})
    reading = source.read(7.0)
    assert reading is not None and (reading.watts, reading.time_s) == (23.0, 7.0)
    assert source.info.coverage is Coverage.WALL
    assert source.self_test(8.0).text == "reads 23.00 W"
    dead: PowerSource = make({"host": "127.0.0.1:1"})
    with pytest.raises(SourceError, match=r"check energy\.plugins\.tasmota\.host"):
        dead.read(9.0)


def test_settings_of_the_readme_are_all_there_are() -> None:
    import tomllib

    block = README.split("## Settings")[1].split("\n\n")[1]
    table = tomllib.loads("\n".join(line.strip() for line in block.splitlines()))
    EnergyConfig.from_table(table)
    assert set(table) | {"plugins"} == set(EnergyConfig.__dataclass_fields__)
