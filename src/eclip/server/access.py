"""Access to a server: the token that clients show, TLS, and who may change what a server serves."""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

# Names that no stranger can own in the public DNS, besides those without a dot.
_PRIVATE = (".localhost", ".local", ".internal", ".svc")


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: Path  # with its chain, in PEM
    key: Path


class Pair:
    """The certificate and key that count now."""

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self.context: ssl.SSLContext | None = None  # of HTTP
        self.read()

    def read(self) -> None:
        """Take what is in the files; raises OSError where they are no pair."""
        tls = self.tls
        pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
        # A context that refuses a pair may have taken its certificate: try with another one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            tls.certificate, tls.key, password=""
        )
        if self.context is not None:
            self.context.load_cert_chain(tls.certificate, tls.key, password="")
        self.pair = pair  # for gRPC


class Token:
    """Checks ``Authorization: Bearer TOKEN`` in a time that does not depend on the token."""

    def __init__(self, token: str) -> None:
        self.change(token)

    def change(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def is_shown(self, authorization: bytes | None) -> bool:
        return authorization is not None and hmac.compare_digest(authorization, self._expected)


class Access:
    """The token and certificate that count now. Both may change while the server runs."""

    def __init__(self, token: str | None, tls: Tls | None, hosts: tuple[str, ...] = ()) -> None:
        self.token = None if token is None else Token(token)
        self.tls = None if tls is None else Pair(tls)
        self.hosts = hosts

    def change(self, token: str | None) -> None:
        """Take this token, and the certificate as it is in its files now; raises OSError."""
        if self.tls is not None:
            self.tls.read()
        if self.token is not None and token is not None:
            self.token.change(token)

    def why_no_control(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Why this request may not change what is served. A page of another origin, or of a name
        that was bound to this address, makes a browser send requests without its user's will. No
        such page knows the token."""
        if self.token is not None:
            return None
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = (urlsplit(f"//{host}").hostname or "") if host else ""
        if not self._is_own(name):
            return (
                f"requests that change the server must come to an address or a name of it, not "
                f"{name[:100]!r}; add it to hosts in [server], or use a token_file"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            return "a page of another origin may not change the server; use a token_file"
        return None

    def _is_own(self, name: str) -> bool:
        if "." not in name or name.endswith(_PRIVATE) or name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
