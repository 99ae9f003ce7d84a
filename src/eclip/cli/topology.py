"""``eclip topology``: lists the devices that eclip knows, with their units and slices."""

from __future__ import annotations

from typing import Annotated

import typer

from eclip.cli import inspect, screen
from eclip.cli.options import JsonOption
from eclip.core.topology import Topology
from eclip.files import store
from eclip.planner.case import find_topology


def topology(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A device of the list, or a topology file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the built-in devices, or show one."""
    if name is not None:
        inspect.show(find_topology(name), as_json)
        return
    known = [store.load_builtin(known, Topology) for known in store.builtin_names(Topology)]
    if as_json:
        screen.print_json(known)
        return
    screen.print_table(
        "Devices",
        ["name", "device", "units", "slices", "lane sizes", "hardware queues"],
        (
            [
                each.name,
                each.title,
                f"{each.units} {each.unit_name}s",
                slices_in_words(each),
                " ".join(map(str, each.lane_sizes)),
                str(each.hardware_queues),
            ]
            for each in known
        ),
        names=2,
    )


def slices_in_words(topology: Topology) -> str:
    """``15 of 8, 1 of 12``"""
    sizes = list(dict.fromkeys(topology.slice_units))
    return ", ".join(f"{topology.slice_units.count(size)} of {size}" for size in sizes)
