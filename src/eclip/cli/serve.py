"""``eclip serve``: serves the models of a file or mix over HTTP and gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eclip.cli import screen
from eclip.server.config import ServerSettings, ServingConfig, read_config, with_settings
from eclip.server.log import ServerLog
from eclip.server.supervisor.running import run_server


def serve(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MIX",
            help="A TOML file that names services, or a mix to try out, such as paper/3.",
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", help="The device: sim, cuda, or cuda:1. Overrides the file."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="The address to listen on. Default: 127.0.0.1."),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", help="Port of HTTP; 0 takes a free port.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option("--grpc-port", help="Port of gRPC; 0 takes a free port.")
    ] = None,
    fronts: Annotated[
        int | None, typer.Option("--fronts", help="Run N processes that take requests.")
    ] = None,
) -> None:
    """Serve models over HTTP and gRPC (Open Inference Protocol), each with a bound on its latency.

    On SIGTERM the server reports not ready, serves for the grace time, answers open requests and
    ends. On SIGHUP the server reads the file again. The log goes to standard error: JSON lines, or
    plain text on a terminal.
    """
    given = {
        "device": device,
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "fronts": fronts,
    }

    def read() -> ServingConfig:
        return with_settings(read_config(source), given)

    file = Path(source)
    run_server(
        read(),
        read,
        ServerLog(),
        lambda server: _say_where(server, source),
        file if file.is_file() else None,
    )


def _say_where(server: ServerSettings, source: str) -> None:
    scheme = "http" if server.tls_cert is None else "https"
    screen.out.print(
        f"Serving {Path(source).name} on {server.device}: {scheme}://{server.host}:"
        f"{server.http_port} (live page), gRPC {server.host}:{server.grpc_port}. "
        f"Ctrl-C ends the server."
    )
