"""hip/hooks.def and hip/known.def as tests read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "native" / "hip"
_HOOK = re.compile(
    r"^([A-Z]+)\((_?\w+), (\d+), (none|spt),\s*\(([^()]*)\),\s*\(([^()]*)\)\)", re.MULTILINE
)
_KNOWN = re.compile(r"^KNOWN\((\w+)\)", re.MULTILINE)
_KINDS = {
    "int": "i4",
    "unsigned": "u4",
    "unsigned short": "u2",
    "unsigned char": "u1",
    "size_t": "u8",
    "uint64_t": "u8",
    "unsigned long long": "u8",
    "dim3": "u12",
    "hipPitchedPtr": "u32",
    "hipExtent": "u24",
    "CUipcEventHandle": "u64",
}


@dataclass(frozen=True)
class Hook:
    kind: str
    symbol: str
    since: int  # 100 × major + minor
    takes: tuple[str, ...]  # p8: a pointer or handle; u4: an unsigned number of four bytes


def read_hooks() -> dict[str, Hook]:
    text = (_FOLDER / "hooks.def").read_text()
    return {
        symbol: Hook(kind, symbol, int(since), _kinds(parameters))
        for kind, symbol, since, _, parameters, _ in _HOOK.findall(text)
    }


def read_known() -> set[str]:
    return set(_KNOWN.findall((_FOLDER / "known.def").read_text()))


def _kinds(parameters: str) -> tuple[str, ...]:
    types = [one.strip().rpartition(" ")[0] for one in parameters.split(",") if one.strip()]
    return tuple(_KINDS.get(" ".join(one.split()), "p8") for one in types)
