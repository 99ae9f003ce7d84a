"""Reports for tests: rendered, and read as a browser would."""

from __future__ import annotations

import base64
import gzip
import json
from html.parser import HTMLParser
from typing import Any

from eclip.core.model_key import ModelKey
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.files.comparison import Comparison
from eclip.reports import page
from eclip.reports.chapters import Chapter, Named, SharingWay, chapters_of


class Reader(HTMLParser):
    """What a browser would make of the page: text, start tags and the contents of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str, str]] = []  # type, text
        self.words: list[str] = []
        self.feed(html)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            kind, text = self.scripts.pop()
            self.scripts.append((kind, text + data))
        elif self.cdata_elem is None:
            self.words.append(data)

    @property
    def data(self) -> list[Any]:
        return [unpacked(text) for kind, text in self.scripts if kind == "application/gzip"]


def unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def render(
    *given: RunLog | Plan | Comparison, profiles: dict[ModelKey, Profile] | None = None
) -> str:
    return page.render(chapters_of(Named(one) for one in given), profiles or {})


def chapter(*given: RunLog | Plan | Comparison) -> Chapter:
    (found,) = chapters_of(Named(one) for one in given)
    return found


def best(found: Chapter) -> SharingWay:
    return found.ways[0]
