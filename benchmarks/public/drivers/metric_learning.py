"""A triplet loss with a miner of pytorch-metric-learning."""

import torch
from pytorch_metric_learning import losses, miners
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
rows, classes = torch.randn(128, 128), torch.arange(128) % 8
miner, loss_of = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()
for _ in range(6):
    embedded = model(rows)
    loss = loss_of(embedded, classes, miner(embedded, classes))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
torch.save(model.state_dict(), "embedding.pt")
