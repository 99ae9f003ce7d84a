"""Encoding: artefacts and texts as the bytes of a file.

A file name may hold bytes that are no UTF-8. Python keeps them as lone surrogates, which UTF-8 does
not have; in a file they are written as escapes, ``\\udcff``.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from eclip.core.topology import Mask

MOST_EXACT = 2**53  # beyond, other readers of JSON round whole numbers
_LONG = re.compile(rb"(?<![\d.])\d{16,}(?![\d.eE])")


def encode_text(text: str) -> bytes:
    """The text as UTF-8, with escapes for what UTF-8 does not have."""
    return text.encode("utf-8", "backslashreplace")


def encode_json(value: Any) -> bytes:
    """The value as JSON, with escapes for what UTF-8 does not have."""
    try:
        return msgspec.json.encode(value, enc_hook=encode_mask)
    except UnicodeEncodeError:  # such as the name of a file in a run log's command
        return msgspec.json.encode(_as_utf8(msgspec.to_builtins(value, enc_hook=encode_mask)))


def beyond_exact(data: bytes) -> int | None:
    """A whole number beyond MOST_EXACT in JSON; None: there is none. Arithmetic on the others stays
    within 64 bits."""
    if _LONG.search(data) is None:  # spares nearly every file the second look
        return None
    try:
        values = [json.loads(data)]
    except (ValueError, RecursionError):
        return None  # the decoder finds the fault
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
        elif isinstance(value, int) and abs(value) > MOST_EXACT:
            return value
    return None


def _as_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return encode_text(value).decode()
    if isinstance(value, dict):
        return {_as_utf8(key): _as_utf8(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_utf8(part) for part in value]
    return value


def encode_mask(value: Any) -> str:
    if isinstance(value, Mask):
        return str(value)
    raise TypeError(f"cannot write a {type(value).__name__}")


def decode_mask(wanted: type, value: Any) -> Mask:
    if wanted is Mask and isinstance(value, str):
        return Mask.parse(value)
    raise ValueError(f"expected {wanted.__name__}, got {value!r}")
