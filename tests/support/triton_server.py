"""A real Triton with the reference models, for the Python that has nvidia-pytriton.

    python triton_server.py HTTP_PORT GRPC_PORT

It writes ``ready`` when it serves, and stops when its standard input ends.
"""

from __future__ import annotations

import sys

from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

from reference_models import MODELS, NUMPY_TYPES, ReferenceModel


def served(model: ReferenceModel):  # type: ignore[no-untyped-def]
    """The model's function as pytriton calls it."""

    def infer(requests):  # type: ignore[no-untyped-def]
        return [dict(model.compute(request)) for request in requests]

    return infer


def main() -> None:
    http_port, grpc_port = map(int, sys.argv[1:])
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=http_port,
        grpc_address="127.0.0.1",
        grpc_port=grpc_port,
        allow_metrics=False,
    )
    open_to_all = TritonSecurityConfig(access_token="unused", restricted_endpoints=[])
    with Triton(config=config, security_config=open_to_all) as triton:
        for model in MODELS:
            tensors = [
                [
                    Tensor(name=name, dtype=NUMPY_TYPES[datatype], shape=shape)
                    for name, datatype, shape in side
                ]
                for side in (model.inputs, model.outputs)
            ]
            triton.bind(
                model_name=model.name,
                infer_func=served(model),
                inputs=tensors[0],
                outputs=tensors[1],
                config=ModelConfig(
                    batching=model.max_batch > 0, max_batch_size=model.max_batch or 1
                ),
            )
        triton.run()
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
