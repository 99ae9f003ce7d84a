"""How much a client may ask of a front. Every limit is checked before the work that it limits."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 64 * MIB  # as sent, and after decompression
    bodies_bytes: int = 1024 * MIB  # of all HTTP requests that are being read or answered
    json_bytes: int = 16 * MIB  # the JSON part: parsing it keeps the event loop busy
    header_bytes: int = 16 * 1024  # request line and headers, or a gRPC call's metadata
    tensors: int = 128  # inputs, and as many outputs
    dimensions: int = 16
    elements: int = 1 << 28  # of one tensor
    read_s: float = 10.0  # from a request's first byte to its last
    write_s: float = 30.0  # without progress while a client reads its answer
    idle_s: float = 75.0  # a connection between two requests
    connections: int = 4096  # of HTTP, and as many of gRPC
    calls: int = 1024  # of gRPC at a time
    regions: int = 256  # of shared memory
