"""A random program whose tensors are larger than its budget: `python large_operands.py SEED` prints
a checksum of all it saw.
"""

import random
import sys
import zlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

SHAPES = [(8, 64, 96, 48), (2048, 1536), (4, 512, 1024), (1024, 2304), (16, 32, 64, 64)]
STEPS = 30

draw = random.Random(int(sys.argv[1]))
torch.manual_seed(int(sys.argv[1]))
live: list[Tensor] = []
seen: list[object] = []


def checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's numbers, read past the operators."""
    return zlib.crc32(tensor.detach().contiguous().numpy())  # type: ignore[arg-type]  # a buffer


def fresh() -> Tensor:
    """Return a tensor of 4 to 12 MiB."""
    return torch.randn(draw.choice(SHAPES)).requires_grad_(draw.random() < 0.5)


parameters = [
    torch.nn.Parameter(torch.randn(1536, 1024) * 0.02),
    torch.nn.Parameter(torch.randn(64, 64, 3, 3) * 0.05),
    torch.nn.Parameter(torch.randn(2304, 700) * 0.02),
]
optimizer = draw.choice([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])(parameters, lr=1e-3)

OPERATORS: list[Callable[[Tensor], Tensor | None]] = [
    lambda x: x.relu(),
    lambda x: x * 1.5 + 0.25,
    lambda x: torch.softmax(x, -1),
    lambda x: functional.gelu(x),
    lambda x: x.transpose(-1, -2).contiguous(),
    lambda x: torch.cat([x, x.detach() * 2], 0)[: x.shape[0]],
    lambda x: functional.layer_norm(x, x.shape[-1:]),
    lambda x: functional.conv2d(x, parameters[1], padding=1) if x.dim() == 4 and x.shape[1] == 64 else None,
    lambda x: x @ parameters[0] if x.shape[-1] == 1536 else None,
    lambda x: x @ parameters[2] if x.shape[-1] == 2304 else None,
    lambda x: note(x if x.requires_grad else x.mul_(0.75)),
    lambda x: note(x),
    lambda x: seen.append(x.sum().item().hex()),
    lambda x: note(x) if x.requires_grad else note(written(x)),
    lambda x: torch.where(x > 0, x, -x),
    lambda x: x.to(torch.bfloat16).to(torch.float32),
    lambda x: x.flatten()[draw.randrange(1000) :].clone()[: 1 << 20].view(1024, 1024),
    lambda x: x.clone(),
    lambda x: torch.exp(-x.abs()),
    lambda x: x.cumsum(-1) * 1e-2,
    lambda x: functional.dropout(x, 0.3),
    lambda _: update(),
]


def note(tensor: Tensor) -> None:
    """Keep a checksum."""
    seen.append(checksum(tensor))


def written(tensor: Tensor) -> Tensor:
    """Write past the operators."""
    tensor.numpy()[..., ::7] += 1
    return tensor


def update() -> None:
    """Train the parameters by what was made last."""
    loss = sum((x.float() * 1e-3).square().mean() for x in live[-3:] if x.requires_grad)
    if isinstance(loss, Tensor):
        optimizer.zero_grad(set_to_none=draw.random() < 0.5)
        loss.backward()
        optimizer.step()
        seen.append(loss.item().hex())
        live[:] = [x.detach() for x in live]


def main() -> None:
    """Run the program."""
    for _ in range(STEPS):
        operand = draw.choice(live) if live and draw.random() < 0.75 else fresh()
        made = draw.choice(OPERATORS)(operand)
        if made is not None:
            live.append(made)
        if live and draw.random() < 0.3:
            note(draw.choice(live))
        while len(live) > draw.randrange(2, 6):
            live.pop(draw.randrange(len(live)))
    seen.extend(checksum(tensor) for tensor in (*live, *parameters))
    print(zlib.crc32(repr(seen).encode()), len(seen))


if __name__ == "__main__":
    main()
