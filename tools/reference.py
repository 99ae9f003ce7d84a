"""Pages of reference in Markdown, made from the code: commands, Python names, file formats."""

from __future__ import annotations

import ast
import enum
import functools
import html
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import typer.main

import eclip
from eclip.cli import make_app
from eclip.errors import EclipError
from eclip.files import store

_LONG_WORD = re.compile(r"\S{25,}")
_EXAMPLE = re.compile(r"::\n\n((?:    .*(?:\n|$)|\n)+)")


# Commands and their options.


def options_page() -> str:
    """Every command, with its arguments and options."""
    app: Any = typer.main.get_command(make_app())
    lines = [
        "# Every option",
        "",
        "`eclip COMMAND --help` prints the same. [Commands](../commands.md) says what commands are "
        "for, and explains mixes, policies and settings.",
        "",
    ]
    for name, command in app.commands.items():
        lines += _command_lines(command, f"eclip {name}", "##")
    return "\n".join(lines)


def _command_lines(command: Any, path: str, heading: str) -> Iterator[str]:
    yield from (f"{heading} {path}", "", _prose(command.help or ""), "")
    context = typer.Context(command, info_name=path)
    subcommands = getattr(command, "commands", {})
    if not subcommands:
        pieces = re.sub(r"[{}]", "", " ".join(command.collect_usage_pieces(context)))
        yield from ("```text", f"{path} {pieces}", "```", "")
    records = [each.get_help_record(context) for each in command.params if each.name != "help"]
    if any(records):
        yield from ("| | |", "|---|---|")
        for names, words in filter(None, records):
            yield _row(_code(re.sub(r"<list\[(\w+)\]>", r"<\1>", names)), _cell(words))
        yield ""
    for name, subcommand in subcommands.items():
        yield from _command_lines(subcommand, f"{path} {name}", heading + "#")


# The Python names.


def python_page() -> str:
    """Everything in ``eclip.__all__``: signature, docstring, members."""
    members = {name: getattr(eclip, name) for name in eclip.__all__}
    functions = [name for name, value in members.items() if inspect.isfunction(value)]
    errors = [name for name, value in members.items() if _is_error(value)]
    classes = [name for name in members if name not in functions and name not in errors]
    lines = ["# Python", "", _prose(inspect.getdoc(eclip) or ""), "", "## Functions", ""]
    for name in functions:
        lines += [f"### eclip.{name}", "", *_function_lines(members[name])]
    lines += ["## Classes", ""]
    for name in classes:
        lines += [f"### eclip.{name}", "", *_class_lines(members[name])]
    lines += ["## Errors", "", "Every error of eclip is an `EclipError`.", ""]
    lines += ["| error | exit code of a command | |", "|---|---|---|"]
    for name in errors:
        code = str(members[name].exit_code)
        lines.append(_row(_code(f"eclip.{name}"), code, _cell(_first_words(members[name]))))
    return "\n".join([*lines, ""])


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, EclipError)


def _function_lines(function: Any) -> list[str]:
    text = _prose(inspect.getdoc(function) or "")
    return ["```python", _signature(function), "```", "", text, ""]


def _signature(function: Any) -> str:
    """As in the source, where annotations are words; defaults by their values."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    arguments = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        given = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        arguments.append(f"{star}{parameter.name}: {parameter.annotation}{given}")
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({', '.join(arguments)}){result}"
    if len(line) <= 80:
        return line
    return f"{node.name}(\n    " + ",\n    ".join(arguments) + f",\n){result}"


def _class_lines(cls: Any) -> Iterator[str]:
    yield from (_prose(_own_doc(cls)), "")
    kinds = {kind: name for name, (kind, _) in store._KINDS.items()}
    if cls in kinds:
        yield from (f"Its fields are those of the [file](files.md#{kinds[cls]}).", "")
    else:
        yield from _field_table(cls, linked={})
    members = [(name, value) for name, value in vars(cls).items() if not name.startswith("_")]
    rows = [row for name, value in members if (row := _member_row(name, value))]
    if rows:
        yield from ("| member | |", "|---|---|", *rows, "")


def _member_row(name: str, member: Any) -> str:
    if isinstance(member, property | functools.cached_property):
        return _row(_code(f".{name}"), _cell(_first_words(member)))
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if not inspect.isfunction(function):
        return ""
    call = " ".join(_signature(function).split()).replace("( ", "(").replace(", )", ")")
    return _row(_code(f".{call}"), _cell(_first_words(function)))


# The files.


def files_page() -> str:
    """Every kind of file, with the structs that it holds."""
    lines = ["# Files", "", _prose((store.__doc__ or "").split("\n\n")[1]), ""]
    lines += [
        "```json",
        '{"format": "eclip/plan", "version": 2, "digest": "…", "body": {…}}',
        "```",
        "",
        "The tables below are the bodies. A field without a value under *unless given* must be "
        "there. Times end in `_ns` and are nanoseconds.",
        "",
    ]
    heads = {kind: name for name, (kind, _) in store._KINDS.items()}
    structs = _reachable(list(heads))
    linked = {each.__name__: heads.get(each, each.__name__.lower()) for each in structs}
    for name, (kind, version) in store._KINDS.items():
        how = store._MADE_BY[name].removeprefix("by hand, ")
        command, comma, rest = how.partition(", ")
        made = f"by {_code(command)}{comma}{rest}" if how.startswith("eclip") else f"by hand, {how}"
        lines += [f"## {name}", "", f"`{kind.__name__}`, version {version}. Made {made}.", ""]
        lines += [_prose(_own_doc(kind)), "", *_field_table(kind, linked)]
    lines += ["## Parts of these files", ""]
    for part in structs:
        if part in heads:
            continue
        lines += [f"### {part.__name__}", "", _prose(_own_doc(part)), ""]
        if issubclass(part, enum.Enum):
            lines += ["One of " + ", ".join(_code(str(each.value)) for each in part) + ".", ""]
        else:
            lines += _field_table(part, linked)
    return "\n".join(lines)


def _reachable(kinds: list[type]) -> list[type]:
    """The kinds and all structs and enumerations that their fields have, each once."""
    found = list(kinds)
    for kind in found:  # grows on the way
        if issubclass(kind, msgspec.Struct):
            for hint in typing.get_type_hints(kind).values():
                found += [each for each in _named_types(hint) if each not in found]
    return found


def _named_types(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and issubclass(hint, msgspec.Struct | enum.Enum):
        yield hint
    for argument in typing.get_args(hint):
        yield from _named_types(argument)


class _Field(NamedTuple):
    """As in the source: the remark is the comment beside it, or right above it."""

    name: str
    annotation: str
    default: str
    remark: str


def _fields(cls: type) -> Iterator[_Field]:
    for each in reversed(cls.__mro__):
        if not each.__module__.startswith("eclip."):
            continue
        text = textwrap.dedent(inspect.getsource(each))
        comments = {
            token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        }
        (body,) = ast.parse(text).body
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield _Field(
                    node.target.id,
                    ast.unparse(node.annotation),
                    _given(node.value, vars(sys.modules[each.__module__])),
                    _comment_at(comments, node.lineno, node.end_lineno or node.lineno),
                )


def _given(value: ast.expr | None, names: dict[str, Any]) -> str:
    """A field's default. A constant of the module is shown by its value, a factory as its call."""
    if isinstance(value, ast.Name | ast.Attribute):
        constant = eval(ast.unparse(value), names)
        return str(getattr(constant, "value", constant))
    if isinstance(value, ast.Call):
        factories = [each.value for each in value.keywords if each.arg == "default_factory"]
        return f"{ast.unparse(factories[0])}()" if factories else ast.unparse(value)
    return ast.unparse(value) if value else ""


def _field_table(cls: type, linked: dict[str, str]) -> list[str]:
    fields = [each for each in _fields(cls) if not each.name.startswith("_")]
    if not fields:
        return []
    lines = ["| field | type | unless given | |", "|---|---|---|---|"]
    for field in fields:
        kind = _type(field.annotation, linked)
        lines.append(_row(_code(field.name), kind, _code(field.default), _cell(field.remark)))
    return [*lines, ""]


def _type(annotation: str, linked: dict[str, str]) -> str:
    def link(word: re.Match[str]) -> str:
        anchor = linked.get(word[0])
        return f'<a href="#{anchor}">{word[0]}</a>' if anchor else word[0]

    return f"<code>{re.sub(r'[A-Za-z_]+', link, annotation).replace('|', '&#124;')}</code>"


def _comment_at(comments: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    beside = [comments[line][0] for line in range(first, last + 1) if line in comments]
    above: list[str] = []
    line = first - 1
    while line in comments and comments[line][1]:
        above.insert(0, comments[line][0])
        line -= 1
    return " ".join([*above, *beside])


# Words.


def _own_doc(cls: type) -> str:
    """The class's own docstring, without what a dataclass or a base makes up."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return "" if text.startswith(f"{cls.__name__}(") else text


def _first_words(value: Any) -> str:
    return " ".join(_first_paragraphs(inspect.getdoc(value) or "", 1).split())


def _first_paragraphs(text: str, count: int) -> str:
    return "\n\n".join(inspect.cleandoc(text).split("\n\n")[:count])


def _prose(docstring: str) -> str:
    """A docstring as Markdown: its examples become blocks."""

    def block(example: re.Match[str]) -> str:
        return f":\n\n```python\n{textwrap.dedent(example[1]).strip()}\n```\n"

    text = _EXAMPLE.sub(block, inspect.cleandoc(docstring) + "\n")
    return re.sub(r"(?<!`)``(?!`)", "`", text).strip()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>" if text else ""


def _cell(text: str) -> str:
    """Words for a table: nothing in them is markup but `code`."""
    parts = " ".join(text.replace("``", "`").split()).split("`")
    parts[::2] = [
        re.sub(r"([*_\[\]])", r"\\\1", html.escape(part, quote=False)).replace("|", "&#124;")
        for part in parts[::2]
    ]
    parts[::2] = [_LONG_WORD.sub(_breakable, part) for part in parts[::2]]
    parts[1::2] = [_code(part) for part in parts[1::2]]
    return "".join(parts)


def _breakable(word: re.Match[str]) -> str:
    """Mixes and lists without blanks: a phone is narrower than they are."""
    return re.sub(r"([,:@])", r"\1<wbr>", word[0])
