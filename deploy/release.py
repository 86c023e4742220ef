#!/usr/bin/env python3
"""Make what a release publishes: `python deploy/release.py DIRECTORY`; `make release` writes dist/.

    port_agent-VERSION.tar.gz      the sources
    port_agent-VERSION-...whl      built from these sources, for this machine and Python
    port_agent-VERSION.cdx.json    what it runs with: names, versions and hashes (CycloneDX 1.6)
    SHA256SUMS                     of all of them, and of wheels that were put there before

Wheels of other machines are built by .github/workflows/release.yml, on them. Nothing is fetched.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("agent", "planner", "firmware", "pyproject.toml", "LICENSE", "README.md")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "*.egg-info", "build", ".mypy_cache")
SUMS = "SHA256SUMS"


def main() -> int:
    """Make all files of a release in a directory and print their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sums-only", action="store_true", help="write the hashes of what is there, and build nothing")
    arguments = parser.parse_args()
    out = arguments.directory.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if not arguments.sums_only:
        with tempfile.TemporaryDirectory(prefix="port-release-") as name:
            sources = build_sources(Path(name), out)
            build_wheel(Path(name), sources, out)
        lists = (ROOT / "deploy" / "hashes.txt").read_text(), (ROOT / "deploy" / "requirements.txt").read_text()
        bill = bill_of_materials(*lists, version_of(sources))
        (out / f"{sources.name.removesuffix('.tar.gz')}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    (out / SUMS).write_text(checksums(out))
    print((out / SUMS).read_text(), end="")
    return 0


def build_sources(work: Path, out: Path) -> Path:
    """Return the archive of the sources, made in `out` of a copy of them: nothing is left in the checkout."""
    copy = work / "checkout"
    copy.mkdir()
    for part in SOURCES:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=NOT_SOURCES)
        else:
            shutil.copy(ROOT / part, copy)
    return out / _built("build_sdist", copy, out)


def build_wheel(work: Path, sources: Path, out: Path) -> Path:
    """Return the wheel, built from the archive and from nothing else."""
    with tarfile.open(sources) as archive:
        archive.extractall(work, filter="data")
    return out / _built("build_wheel", work / sources.name.removesuffix(".tar.gz"), out)


def _built(what: str, folder: Path, out: Path) -> str:
    """Return the name of the file that setuptools builds in `out`; raises SystemExit where it fails."""
    program = f"from setuptools import build_meta; print(build_meta.{what}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"release: {what} failed; setuptools 77 or later must be installed:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def version_of(sources: Path) -> str:
    """Return the version in the name of an archive of sources."""
    return sources.name.removesuffix(".tar.gz").partition("-")[2]


def bill_of_materials(hashes: str, requirements: str, version: str) -> dict[str, Any]:
    """Return what a version runs with, from the lists of exact versions and of their files'
    hashes, as CycloneDX 1.6.
    """
    hashes_of = {
        _normal(name): re.findall(r"sha256:([0-9a-f]{64})", block)
        for name, block in re.findall(r"^([\w.-]+)==\S+ \\\n((?:    --hash=\S+(?: \\)?\n?)+)", hashes, re.M)
    }
    components = [
        {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{number}",
            "name": name,
            "version": number,
            "purl": f"pkg:pypi/{name}@{number}",
            "externalReferences": [
                {
                    "type": "distribution",
                    "url": f"https://pypi.org/project/{name}/{number}/",
                    "hashes": [{"alg": "SHA-256", "content": digest}],
                }
                for digest in hashes_of.get(name, ())
            ],
        }
        for name, number in (
            (_normal(name), number) for name, number in re.findall(r"^([\w.-]+)==(\S+)$", requirements, re.M)
        )
    ]
    own = {
        "type": "application",
        "bom-ref": "port-agent",
        "name": "port-agent",
        "version": version,
        "licenses": [{"license": {"id": "MIT"}}],
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": "port-agent", "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _normal(name: str) -> str:
    """Return a distribution's name as the package index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def checksums(folder: Path) -> str:
    """Return the SHA-256 of the files of a directory, as `sha256sum -c` reads them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


if __name__ == "__main__":
    sys.exit(main())
