"""torchvision: Faster R-CNN, whose shapes depend on what it finds."""

import torch
from telling import tell
from torchvision.models.detection import fasterrcnn_resnet50_fpn

torch.manual_seed(0)
model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).eval().cuda()
with torch.inference_mode():
    found = [model([torch.rand(3, 320, 480, device="cuda")])[0] for _ in range(20)]
tell(*(one[key] for one in found for key in ("boxes", "scores", "labels")))
