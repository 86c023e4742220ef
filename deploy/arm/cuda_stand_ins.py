#!/usr/bin/env python3
"""Make libraries by the names of CUDA's that a CUDA build of torch asks for, in which every function
says that there is no device.

    cuda_stand_ins.py TORCH_LIB

So the build from PyPI, the only one where no index of CPU builds can be reached, computes on the CPU without gigabytes
of CUDA. Runs where the compiler is that of the libraries' architecture.
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice."""
OF_CUDA = re.compile(r"lib(cu|nv|nccl)")
UNVERSIONED = re.compile(r"(cu|nv|nccl)\w+")
"""Functions of CUDA's whose library does not say that they are its own: of nccl, cufile, nvshmem and the driver."""
SAYS = re.compile(r"(?!cuGet)\w+(Error|Status|Result)\w*(String|Name)|ncclGetLastError")
"""Functions that return a text about an error, which torch puts into its exception; the driver's write its address."""


def read(option: str, library: Path) -> str:
    """Return what readelf says of a library."""
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield the name of each dynamic symbol, its version or "", and whether the library has it."""
    for line in read("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].endswith(":"):
            name, _, version = fields[7].partition("@")
            yield name, version.lstrip("@"), fields[6] != "UND"


def versions_of(libraries: list[Path]) -> defaultdict[str, set[str]]:
    """Return the versions of symbols that are wanted of each library, by its name."""
    versions, of = defaultdict[str, set[str]](set), ""
    for path in libraries:
        for kind, name in re.findall(r"\b(File|Name): (\S+)", read("-V", path)):
            if kind == "File":
                of = name
            else:
                versions[of].add(name)
    return versions


def stand_in(name: str) -> str:
    """Return a function in C that says that there is no device."""
    if SAYS.fullmatch(name):
        return f'const char *{name}(void) {{ return "no device"; }}\n'
    return f"int {name}(void) {{ return {NO_DEVICE}; }}\n"


def main() -> None:
    """Write the libraries next to those that ask for them."""
    folder = Path(sys.argv[1])
    libraries = [path for path in folder.iterdir() if ".so" in path.name]
    versions = versions_of(libraries)
    needed = {
        name for path in libraries for name in re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", read("-d", path))
    }
    cuda = sorted(name for name in needed if OF_CUDA.match(name) and not (folder / name).exists())
    found = [symbol for path in libraries for symbol in symbols(path)]
    there = {name for name, _, has in found if has}
    functions = defaultdict[str, set[str]](set)
    for name, version, has in found:
        if not has and (
            any(version in versions[library] for library in cuda)
            or (not version and name not in there and UNVERSIONED.fullmatch(name))
        ):
            functions[version].add(name)
    for library in cuda:
        nodes = {version: sorted(functions[version]) for version in sorted(versions[library]) if functions[version]}
        own = {name for names in nodes.values() for name in names} or functions[""]
        source, script = folder / "stand_in.c", folder / "stand_in.map"
        source.write_text("".join(map(stand_in, sorted(own))))
        script.write_text("".join(f"{node} {{ global: {'; '.join(names)}; }};\n" for node, names in nodes.items()))
        versioned = [f"-Wl,--version-script={script}"] if nodes else []
        target = ["-o", str(folder / library), f"-Wl,-soname,{library}", *versioned]
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", *target, str(source)], check=True)
        source.unlink()
        script.unlink()
    sys.stdout.write(f"stand-ins for {len(cuda)} libraries of CUDA's: {', '.join(cuda)}\n")


if __name__ == "__main__":
    main()
