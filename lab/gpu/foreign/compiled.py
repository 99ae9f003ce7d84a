"""torch.compile: Triton kernels that Inductor writes."""

import torch
import torchvision
from telling import tell

torch.manual_seed(0)
model = torch.compile(torchvision.models.mobilenet_v3_small(weights=None).eval().cuda())
with torch.inference_mode():
    found = [model(torch.randn(8, 3, 224, 224, device="cuda")) for _ in range(60)]
tell(*found)
