"""Ports that clients ask at: found free before anything starts, and held for all fronts that share
them."""

from __future__ import annotations

import contextlib
import socket

import msgspec

from eclip.errors import UsageError
from eclip.server.config import ServerSettings


def free_port(host: str, asked: int, name: str) -> int:
    """The port, or with 0 one that is free; refused if another socket listens there. Alone,
    although it will be shared: a port that others share would give us some of their clients."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            alone.bind((host, asked))
        except (OSError, TypeError) as error:  # TypeError: a name that no host can have
            raise _refusal(host, asked, name, error) from None
        number: int = alone.getsockname()[1]
        return number


def reserve_ports(server: ServerSettings, stack: contextlib.ExitStack) -> ServerSettings:
    """The settings with ports that are free, held for all fronts as long as the stack: they share
    them, and one that starts anew gets them again."""
    ports = {}
    for name in ("http_port", "grpc_port"):
        number = free_port(server.host, getattr(server, name), name)
        shared = stack.enter_context(socket.socket(_family(server.host), socket.SOCK_STREAM))
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            shared.bind((server.host, number))
        except OSError as error:
            raise _refusal(server.host, number, name, error) from None
        ports[name] = number
    return msgspec.structs.replace(server, **ports)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _refusal(host: str, port: int, name: str, error: OSError | TypeError) -> UsageError:
    why = getattr(error, "strerror", None) or error
    return UsageError(f"cannot listen on {host}:{port} ({why}); give another host or {name}")
