"""A gRPC server that gives bytes back and does nothing else: what grpc.aio itself takes.

python lab/support/echo.py    prints its port, and serves until it is killed
"""

from __future__ import annotations

from typing import Any

import grpc
import uvloop

SERVICE, METHOD = "echo", "Echo"


async def serve() -> None:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    server = grpc.aio.server()
    handlers: dict[str, Any] = {METHOD: grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve())
