"""A loop with accelerate: accumulation, clipping, its own state saved and loaded."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(128, 256), torch.randint(0, 10, (128,))), 16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for rows, classes in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(rows), classes)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(loss.item().hex())
    accelerator.save_state(f"state{epoch}")
accelerator.load_state("state0")
torch.save(accelerator.unwrap_model(model).state_dict(), "accelerated.pt")
