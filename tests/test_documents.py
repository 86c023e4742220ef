"""What ARCHITECTURE.md, CONTRIBUTING.md and README.md name is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("agent", "planner", "tests", "firmware", "deploy")


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_named_files_and_folders_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = set(re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)`", text)) | set(re.findall(r"\]\(([\w./-]+)\)", text))
    to_come = {"agent/backend/"}
    missing = {
        path
        for path in named - to_come
        if "NAME" not in path and not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()
    }
    assert named and not missing, f"{name} names {sorted(missing)}, which do not exist"
