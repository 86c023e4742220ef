"""Training with differential privacy by opacus: gradients of each sample, by hooks."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 1, 16, 16), torch.randint(0, 4, (128,)))
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=32),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
for pictures, classes in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(pictures), classes)
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print(engine.get_epsilon(delta=1e-5))
torch.save(model.state_dict(), "private.pt")
