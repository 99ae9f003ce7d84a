"""``eclip doctor``: whether this host can run plans on a GPU, and what is missing."""

from __future__ import annotations

from typing import Annotated

import typer

from eclip.cli import screen
from eclip.cli.options import JsonOption
from eclip.devices import examine_host


def doctor(
    device: Annotated[
        str, typer.Option("--device", help="The GPU: cuda, hip, or cuda:1 for the second GPU.")
    ] = "cuda",
    as_json: JsonOption = False,
) -> None:
    """Check whether this host can run plans on a GPU, and list what is missing."""
    examined = examine_host(device)
    findings = examined.findings
    missing = [one.what for one in findings if one.state == "missing"]
    if as_json:
        screen.print_json(findings)
    else:
        screen.print_table(
            device,
            ["", "state", "found", "what to do"],
            ([one.what, one.state, one.found, one.remedy] for one in findings),
            names=4,
        )
        if any(one.what.startswith("package") and one.state != "ok" for one in findings):
            screen.out.print(f"All packages for the GPU: {examined.install}.")
        screen.out.print(
            f"Cannot run on a GPU: {', '.join(missing)}. The simulator (--device sim) works."
            if missing
            else f"This host can run plans: eclip demo --device {device}",
        )
    if missing:
        raise typer.Exit(1)
