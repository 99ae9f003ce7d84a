"""Made: the date, version and command that made an artefact."""

from __future__ import annotations

import datetime
import importlib.metadata

import msgspec


class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    date: str  # ISO 8601, UTC
    eclip: str  # its version
    command: str  # that repeats it


def made_now(command: str) -> Made:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Made(date=date, eclip=version(), command=command)


def version() -> str:
    try:
        return importlib.metadata.version("eclip")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout through PYTHONPATH
        return "0+checkout"
