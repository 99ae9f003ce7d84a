"""timm: a training loop with its own optimizer, loss and mixup."""

import timm
import torch
from telling import tell
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = timm.create_model("resnet26", pretrained=False, num_classes=16).cuda().train()
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
mixup, criterion = Mixup(mixup_alpha=0.0, num_classes=16), SoftTargetCrossEntropy()
losses = []
for _ in range(30):
    images = torch.randn(16, 3, 160, 160, device="cuda")
    labels = torch.randint(0, 16, (16,), device="cuda")
    loss = criterion(model(images), mixup(images, labels)[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
tell(torch.stack(losses))
