"""A helper process for tests: says back what it is sent, or does what goes wrong."""

import sys
import time
from pathlib import Path

import msgspec

from port_agent.system.helper_process import helper_exit_code, requests, send_event
from port_planner.base.errors import PortError


class Say(msgspec.Struct, frozen=True):
    """Print a text repeatedly; `failing`: end with an error instead."""

    text: str
    times: int = 1
    failing: bool = False


class Said(msgspec.Struct, frozen=True, tag_field="event", tag="said"):
    """A text, and whether it is the last time."""

    text: str
    is_last: bool


class Elsewhere(msgspec.Struct, frozen=True, tag_field="event", tag="cwd"):
    """Where the process stands."""

    directory: str


Event = Said | Elsewhere


def work() -> None:
    """Answer."""
    send_event(Elsewhere(str(Path.cwd())))
    for request in requests(msgspec.json.Decoder(Say)):
        if request.failing:
            raise PortError(f"first line\n{request.text}")
        for number in range(1, request.times + 1):
            send_event(Said(request.text, number == request.times))


if __name__ == "__main__":
    if sys.argv[1:] == ["sleep"]:
        time.sleep(600.0)
    if sys.argv[1:] == ["upper"]:
        sys.stdout.buffer.write(sys.stdin.buffer.read().upper())
        sys.exit(0)
    if sys.argv[1:] == ["junk"]:
        print("no event")
    sys.exit(helper_exit_code(work))
