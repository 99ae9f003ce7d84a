"""What an examination of a host for a device finds: the rows of ``eclip doctor``."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from eclip.errors import EclipError


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    state: str  # ok, missing, or warning
    found: str
    remedy: str = ""


class Findings(list[Finding]):
    def look(self, what: str, how: Callable[[], str], remedy: str, failed: str = "missing") -> bool:
        """Add what was found, or what it failed of."""
        try:
            self.append(Finding(what=what, state="ok", found=how()))
        except EclipError as error:
            self.append(Finding(what=what, state=failed, found=str(error), remedy=remedy))
            return False
        return True
