"""torch.compile with CUDA graphs of its own (reduce-overhead)."""

import torch
import torchvision
from telling import tell

torch.manual_seed(0)
network = torchvision.models.resnet18(weights=None).eval().cuda()
model = torch.compile(network, mode="reduce-overhead")
with torch.inference_mode():
    found = [model(torch.randn(4, 3, 224, 224, device="cuda")).clone() for _ in range(80)]
tell(*found)
