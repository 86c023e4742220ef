"""A neural differential equation by torchdiffeq, with and without the adjoint method."""

import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

torch.manual_seed(0)


class Field(nn.Module):
    """The derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 2))

    def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y**3)


times = torch.linspace(0.0, 2.0, 20)
matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
with torch.no_grad():
    true = odeint(lambda t, y: (y**3) @ matrix, torch.tensor([[2.0, 0.0]]), times, method="dopri5")
for solve in (odeint, odeint_adjoint):
    field = Field()
    optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        loss = (solve(field, true[0], times) - true).abs().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex())
