"""ResNet-50 and BERT in two threads: eager requests, then replays of captured graphs.

    python two_models.py OUT REQUESTS eager|all

Writes outputs, and the SMs that each place of the models ran on, to OUT (a .npz file).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from serving import MODELS, Model, Where

WARMUPS = 2
Outputs = dict[str, torch.Tensor]


def run_eager(model: Model, where: Where, requests: int, outputs: Outputs) -> None:
    with torch.inference_mode(), torch.cuda.stream(model.stream):
        for request in range(requests):
            output = model(model.inputs)
            model.stream.synchronize()
            if request == WARMUPS - 1:  # from here on every place is told anew
                where.counts.zero_()
                model.stream.synchronize()
    outputs[f"eager_{model.name}"] = output


def run_graph(model: Model, graph: torch.cuda.CUDAGraph, requests: int) -> None:
    with torch.cuda.stream(model.stream):
        for _ in range(requests):
            graph.replay()
            model.stream.synchronize()


def in_threads(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()


def main() -> None:
    out, requests, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    where = Where()
    models = [Model(name, where) for name in MODELS]
    torch.cuda.synchronize()
    for model in models:  # so that whoever counts workers meets them in this order
        with torch.inference_mode(), torch.cuda.stream(model.stream):
            model(model.inputs)
        torch.cuda.synchronize()
    outputs: Outputs = {}
    in_threads(*(partial(run_eager, model, where, requests, outputs) for model in models))
    outputs["eager_where"] = where.counts.clone()
    if phase == "all":
        graphs = []
        for model in models:
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph, stream=model.stream):
                outputs[f"graph_{model.name}"] = model(model.inputs)
            graphs.append(partial(run_graph, model, graph, requests))
        where.counts.zero_()
        torch.cuda.synchronize()
        in_threads(*graphs)
        outputs["graph_where"] = where.counts
    arrays: dict[str, Any] = {name: one.float().cpu().numpy() for name, one in outputs.items()}
    np.savez(out, **arrays)


if __name__ == "__main__":
    main()
