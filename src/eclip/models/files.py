"""Models in files: which file a name stands for, in this process and those that it starts.

A profile is measured in a child, and a worker is captured in another process: both get a model's
name and nothing else. So the files are in a variable of the environment. Their inputs are there
too, because a TorchScript file does not tell them. Loading needs torch: ``capture/named.py``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

VARIABLE = "ECLIP_MODEL_FILES"
_PREFIX = "file."  # no model of the zoo is named like this


class FileModel(msgspec.Struct, frozen=True):
    file: str  # .pt2 of torch.export, or .ts of TorchScript
    inputs: tuple[tuple[str, tuple[int, ...]], ...]  # as torch calls its type, and a row's shape
    batched: bool = True  # inputs have the batch before a row's shape


def name_of(service: str) -> str:
    """The model's name for a service that is served from a file."""
    return _PREFIX + service


def announce(models: Mapping[str, FileModel]) -> None:
    """Make these names, and no others, stand for these files."""
    os.environ[VARIABLE] = msgspec.json.encode(models).decode()


def find_file(name: str) -> FileModel | None:
    if not name.startswith(_PREFIX):
        return None
    known = msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=dict[str, FileModel])
    return known.get(name)
