"""What `make docs` adds to docs/: pages made from the code, tables made from data (tables.py), and
CONTRIBUTING.md.

mkdocs loads this file as a hook. Everything that the reference says is read from the code when the
site is built: commands and options from the command line itself, functions and classes from
`eclip.__all__`, file formats from the structs of `eclip.core` and `eclip.files`.
"""

from __future__ import annotations

import re
from pathlib import Path

import reference  # beside this file, as tables
import tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FENCED = re.compile(r"(```.*?```)", re.DOTALL)
_LEADS_OUT = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")
# What tests/e2e/test_blocks.py knows by a mark, in words for a reader; a long block needs nothing.
_NEEDS = {
    "gpu": ' title="needs a GPU"',
    "network": ' title="needs a network"',
    "cluster": ' title="needs a cluster"',
    "long": "",
}
_MARK = re.compile(rf"^(```\w+) ({'|'.join(_NEEDS)})$", re.MULTILINE)
_LONG_CELL = re.compile(r"<td>([^\n]{32,})</td>")
_NESTED = re.compile(r"^( {2,3})(?=- |\d+\. )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/", "]("),
        "reference/options.md": reference.options_page(),
        "reference/python.md": reference.python_page(),
        "reference/files.md": reference.files_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The documents are written for GitHub's Markdown; some things differ in Python's."""
    if page.parent is None:  # alone under its tab: the list beside it would have one entry
        page.meta["hide"] = ["navigation"]
    markdown = tables.filled(markdown)
    markdown = _MARK.sub(lambda fence: fence[1] + _NEEDS[fence[2]], markdown)
    parts = _FENCED.split(markdown)
    parts[::2] = [_suit(part, page.file.src_uri.count("/")) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The empty corner of a table is no header of its column. Long words get a column's width."""
    return _LONG_CELL.sub(r'<td class="long">\1</td>', html.replace("<th></th>", "<td></td>"))


def _suit(text: str, depth: int) -> str:
    """Nested lists take four spaces. A link to a file of the checkout becomes that file's path."""

    def name_file(link: re.Match[str]) -> str:
        words, upwards, path = link.groups()
        if upwards.count("/") <= depth:
            return link[0]
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return _LEADS_OUT.sub(name_file, _NESTED.sub("    ", text))
