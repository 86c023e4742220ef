"""Short forms of a trainer's options for tests."""

from pathlib import Path
from typing import Any

from port_agent.worker.worker_options import TorchOptions


def train_options(
    state_dir: Path, page_dir: Path, plan: int | None = None, steps: int | None = None, **more: Any
) -> TorchOptions:
    """Return options of the worker; the bundle is opened by whoever calls."""
    return TorchOptions(bundle=Path(), state_dir=state_dir, page_dir=page_dir, plan=plan, steps=steps, **more)
