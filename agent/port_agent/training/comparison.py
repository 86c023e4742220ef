"""Compare a bundle's first steps with plain PyTorch's, which were recorded where the bundle was planned."""

import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping

import torch
import xxhash

from port_planner.base.errors import ExitCode, PortError
from port_planner.base.processor import core_names, cpuinfo
from port_planner.base.tensor_bytes import chunks_of_tensor
from port_planner.ir.arithmetic import differences
from port_planner.ir.bundle.manifest import ExpectedResults
from port_planner.ir.device_kinds import CPU
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.ir.torch_device import device_name, generator_states

_UNSPECIFIC_VECTORS = ("DEFAULT", "NO AVX")
"""Torch's names for vector units that do not determine the kernels; every Arm core without SVE has the same name."""
_BLAS = re.compile(r"BLAS_INFO=(\w+)")

Chunks = Callable[[str], Iterable[memoryview]]
"""Returns the bytes of a storage by its key, in row-major order."""


_OTHERWISE = "the script does something that the recorded step does not do; train it with `port-agent exec`, which runs the program itself"


class MismatchError(PortError):
    """The first steps gave different numbers than plain PyTorch gave where the bundle was made."""

    exit_code = ExitCode.IMPOSSIBLE


def processor(kind: str = CPU) -> str:
    """Return the properties of a kind of device that determine an operator's last digits,
    besides torch and its threads.
    """
    vectors, blas = torch.backends.cpu.get_cpu_capability(), _BLAS.search(torch.__config__.show())
    cores = core_names(cpuinfo()) if vectors in _UNSPECIFIC_VECTORS else ()
    host = f"{platform.machine()} {' and '.join(cores) or vectors}{f', {blas[1]}' if blas else ''}"
    return host if kind == CPU else f"{device_name(kind)} beside {host}"


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the XXH3-64 of a tensor's bytes in row-major order."""
    return _checksum(chunks_of_tensor(tensor))


def generator_checksums(kind: str) -> dict[str, str]:
    """Return the XXH3-64 of the states of the default generators of the CPU and of a kind of device, by kind."""
    return {of: tensor_checksum(state) for of, state in generator_states((kind,)).items()}


def compare_generators(expected: Mapping[str, str], kind: str) -> None:
    """Raise MismatchError unless torch's generators are in the same state as in the script alone."""
    found = generator_checksums(kind)
    other = [of for of in expected if found.get(of) != expected[of]]
    if other:
        raise MismatchError(
            f"the random generators of {', '.join(other)} differ from those after as many updates of the script "
            f"alone: {_OTHERWISE}"
        )


def compare_step(reference: ExpectedResults, step: int, loss: float, chunks: Chunks, kind: str = CPU) -> None:
    """Compare the loss of step `step`, counted from 1, and after the last recorded step also the state.

    `kind`: kind of device that computed the step. Raises MismatchError.
    """
    if step > len(reference.losses):
        return
    expected = float.fromhex(reference.losses[step - 1])
    if loss != expected and not (math.isnan(loss) and math.isnan(expected)):
        raise _mismatch(
            reference,
            processor(kind),
            f"step {step} gave the loss {loss!r}; {_whose(reference)} gave {expected!r} where the job was planned "
            f"(difference {abs(loss - expected):.2e})",
        )
    if step < len(reference.losses):
        return
    different = [key for key, known in reference.checksums.items() if _checksum(chunks(key)) != known]
    if different:
        raise _mismatch(
            reference,
            processor(kind),
            f"after step {step} {len(different)} of {len(reference.checksums)} tensors have different bits than "
            f"{_whose(reference)} gave where the job was planned, {different[0]} first; the losses were the same",
        )


def _whose(reference: ExpectedResults) -> str:
    return "its operators run one at a time on their devices" if reference.placed else "plain PyTorch"


def _checksum(chunks: Iterable[memoryview]) -> str:
    total = xxhash.xxh3_64()
    for chunk in chunks:
        total.update(chunk)
    return total.hexdigest()


def _mismatch(reference: ExpectedResults, here: str, difference: str) -> MismatchError:
    if reference.arithmetic is not None:
        settings = "; ".join(differences(arithmetic(), reference.arithmetic))
        difference += f" (with torch's {settings} now)" if settings else ""
    if reference.processor in ("", here):
        return MismatchError(f"{difference}: {_OTHERWISE}")
    return MismatchError(
        f"{difference}; it was planned on {reference.processor} and runs on {here}, where small differences are "
        "normal; plan the job on this machine, or train with --verify 0"
    )
