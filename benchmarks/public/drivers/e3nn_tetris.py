"""An equivariant network of e3nn's, trained on points."""

import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate

torch.manual_seed(0)
irreps = o3.Irreps("16x0e + 8x1o")
harmonics = o3.Irreps.spherical_harmonics(2)
gate = Gate("16x0e", [torch.relu], "8x0e", [torch.sigmoid], "8x1o")
product = o3.FullyConnectedTensorProduct(irreps, harmonics, gate.irreps_in, shared_weights=False)
weights = FullyConnectedNet([8, 64, product.weight_numel], torch.relu)
out = o3.Linear(gate.irreps_out, "1x0e")
optimizer = torch.optim.Adam([*weights.parameters(), *out.parameters()], lr=0.01)
points, features, radial = torch.randn(64, 3), irreps.randn(64, -1), torch.rand(64, 8)
target = points.norm(dim=1, keepdim=True)
for _ in range(5):
    around = o3.spherical_harmonics(harmonics, points, normalize=True)
    loss = (out(gate(product(features, around, weights(radial)))) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
