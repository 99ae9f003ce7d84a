"""A training loop as people write them: a data loader with processes, autocast, autograd, Adam.

python train.py MODEL BATCH
python train.py MODEL BATCH losses STEPS    only prints the losses of so many steps, as hex
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from loops import run_steps
from networks import IMAGE, network
from talk import say
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

CLASSES, KEPT, WARM_UP = 1000, 64, 8


class Images(Dataset[Any]):
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        self.images = torch.randn(KEPT, 3, IMAGE, IMAGE, generator=made)

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.images[index % KEPT], index % CLASSES


class Training:
    def __init__(self, name: str, batch: int) -> None:
        self.model = network(name).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        loader = DataLoader(Images(), batch, num_workers=2, pin_memory=True)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step(self) -> Any:
        images, labels = (one.cuda(non_blocking=True) for one in next(self.batches))
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main(name: str, batch: int, steps: int | None) -> None:
    if steps is not None:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    training = Training(name, batch)
    if steps is not None:
        losses = [training.step() for _ in range(steps)]
        say(losses=[float(loss).hex() for loss in losses])
        return
    for _ in range(WARM_UP):
        training.step()
    torch.cuda.synchronize()
    run_steps(training.step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]) if sys.argv[3:4] == ["losses"] else None)
