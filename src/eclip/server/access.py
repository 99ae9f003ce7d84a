"""Access to a server: the token that clients show, and TLS."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: Path  # with its chain, in PEM
    key: Path


class Token:
    """Checks ``Authorization: Bearer TOKEN`` in a time that does not depend on the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def is_shown(self, authorization: bytes | None) -> bool:
        return authorization is not None and hmac.compare_digest(authorization, self._expected)
