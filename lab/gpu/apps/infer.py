"""Batch inference, eager and back to back: python infer.py MODEL BATCH"""

from __future__ import annotations

import sys

import torch
from loops import run_steps
from networks import example, network

WARM_UP = 5


def main(name: str, batch: int) -> None:
    model, inputs = network(name).eval().half(), example(name, batch)
    inputs = inputs.half() if inputs.is_floating_point() else inputs

    def step() -> None:
        with torch.inference_mode():
            model(inputs)

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    run_steps(step)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
