"""The house: what may stand in which room, and how large a thing may grow."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import eclip
from eclip.cli import COMMANDS, make_app

ROOT = Path(eclip.__file__).parent
CHECKOUT = ROOT.parents[1]
DEVICE_NAMES = {"sim", "cuda", "hip"}
DEVICE_TYPES = {"SimDevice", "CudaDevice", "HipDevice"}
# The door, which knows the devices by name, and their own rooms.
DEVICE_ROOMS = ("devices.py", "sim/", "gpu/", "cuda/", "hip/")
MOST_PARAMETERS = 10
MOST_METHODS = 15
MOST_OPTIONS = 20
# An operation a method: what a model of the zoo may do.
MANY_METHODS = {"Tape"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: Path) -> Iterator[tuple[str, ast.Module]]:
    """Every file of the folders: where it stands, and what it says."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(CHECKOUT).as_posix(), ast.parse(path.read_text("utf-8"))


def room(*parts: str) -> str:
    return ROOT.joinpath(*parts).relative_to(CHECKOUT).as_posix() + "/"


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported; of ``from eclip import cli``, ``eclip.cli``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_ours(name: str) -> bool:
    return name == "eclip" or name.startswith("eclip.")


# --- The command line is a door, not a room ---------------------------------------------------


def test_command_line_holds_commands_options_and_the_screen() -> None:
    names = {path.relative_to(ROOT / "cli").parts[0] for path in (ROOT / "cli").rglob("*.py")}
    commands = {f"{name}.py" for name in COMMANDS}
    assert names == commands | {"__init__.py", "options.py", "screen"}


def uses_commands(tree: ast.AST) -> list[str]:
    return [name for name in imported(tree) if f"{name}.".startswith("eclip.cli.")]


def test_nothing_but_the_door_and_tests_imports_the_command_line() -> None:
    found = [
        f"{where} imports {name}"
        for where, tree in sources(ROOT, CHECKOUT / "lab", CHECKOUT / "examples")
        if not where.startswith(room("cli")) and where != room()[:-1] + "/__main__.py"
        for name in uses_commands(tree)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ["import eclip.cli", "from eclip.cli import screen", "from eclip import cli",
     "def f():\n    from eclip.cli.screen import tables"],
)  # fmt: skip
def test_an_import_of_the_command_line_is_found(source: str) -> None:
    assert uses_commands(ast.parse(source))
    assert not uses_commands(ast.parse("from eclip import client\nimport eclip.clippy"))


# --- Devices are asked, not guessed -----------------------------------------------------------


def guesses(tree: ast.AST) -> list[str]:
    """Tests on a device's type or name."""
    found = []
    for node in ast.walk(tree):
        tests: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            tests = node.args[1:] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.Compare):
            tests = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            patterns = list(ast.walk(node.pattern))
            tests = [part.value for part in patterns if isinstance(part, ast.MatchValue)]
            tests += [part.cls for part in patterns if isinstance(part, ast.MatchClass)]
        parts = [part for test in tests for part in ast.walk(test)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        names |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
        texts = {part.value for part in parts if isinstance(part, ast.Constant)}
        if names & DEVICE_TYPES or texts & DEVICE_NAMES:
            found.append(ast.unparse(node))
    return found


def test_devices_are_told_apart_only_in_their_own_room() -> None:
    found = [
        f"{where}: {guess}"
        for where, tree in sources(ROOT)
        if not where.startswith(tuple(room()[:-1] + "/" + name for name in DEVICE_ROOMS))
        for guess in guesses(tree)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(device, CudaDevice)",
        "isinstance(device, (A, module.SimDevice))",
        "device == 'sim'",
        "'cuda' != name",
        "name in ('sim', 'cuda')",
        "type(device) is SimDevice",
        "match device:\n    case 'cuda':\n        pass",
        "match device:\n    case SimDevice():\n        pass",
    ],
)
def test_a_guess_is_found(source: str) -> None:
    assert guesses(ast.parse(source))


@pytest.mark.parametrize("source", ["open_device('cuda')", "def f(device='sim'): pass", "a == b"])
def test_naming_a_device_is_no_guess(source: str) -> None:
    assert not guesses(ast.parse(source))


# --- Sizes ------------------------------------------------------------------------------------


def parameters(function: Function) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    receiver = bool(named) and named[0].arg in ("self", "cls")
    return len(named) - receiver + (given.vararg is not None) + (given.kwarg is not None)


def is_compiled(function: Function) -> bool:
    """A loop that numba compiles takes arrays, not objects that hold them."""
    return any(
        re.match(
            r"(numba\.)?(njit|jit|vectorize|cfunc)\b|compiled(_with)?\b", ast.unparse(decorator)
        )
        for decorator in function.decorator_list
    )


def test_no_function_takes_more_than_ten_parameters() -> None:
    found = [
        f"{where}: {function.name} takes {parameters(function)}"
        for where, tree in sources(ROOT)
        for function in functions(tree)
        if parameters(function) > MOST_PARAMETERS
        and not is_compiled(function)
        and not (where.startswith(room("cli")) and function in tree.body)  # a command's options
    ]
    assert found == []


def test_parameters_are_counted_without_the_receiver() -> None:
    (method,) = functions(ast.parse("def f(self, a, /, b, *c, d=1, **e): pass"))
    assert parameters(method) == 5
    assert is_compiled(next(functions(ast.parse("@numba.njit(nogil=True)\ndef f(): pass"))))
    assert not is_compiled(next(functions(ast.parse("@functools.cache\ndef f(): pass"))))


def test_no_class_has_more_than_fifteen_methods() -> None:
    found = [
        f"{where}: {node.name}"
        for where, tree in sources(ROOT)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in MANY_METHODS
        if sum(isinstance(part, Function) for part in node.body) > MOST_METHODS
    ]
    assert found == []


def test_compare_has_at_most_twenty_options() -> None:
    command = typer.main.get_command(make_app(["compare"]))
    compare = command.commands["compare"] if hasattr(command, "commands") else command
    options = [one.name for one in compare.params if one.param_type_name == "option"]
    assert len(set(options) - {"help"}) <= MOST_OPTIONS


# --- Names and imports ------------------------------------------------------------------------


def test_a_class_name_means_one_thing_in_its_folder() -> None:
    places = defaultdict(list)
    for where, tree in sources(ROOT):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[where.rpartition("/")[0], node.name].append(where)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def late_imports(tree: ast.Module) -> list[str]:
    """Imports of eclip's own modules inside functions."""
    found = {name for function in functions(tree) for name in imported(function) if is_ours(name)}
    return sorted(found)


def says_why(tree: ast.Module) -> bool:
    return "import" in (ast.get_docstring(tree) or "").lower()


def test_an_import_inside_a_function_is_explained_by_its_module() -> None:
    """What is heavy, needs a GPU, or would go in a circle is imported when it is needed; the
    module's docstring then speaks of what it imports, and why. All else is imported at the top."""
    found = [
        f"{where} imports {', '.join(late)} in a function, and does not say why"
        for where, tree in sources(ROOT)
        if (late := late_imports(tree)) and not says_why(tree)
    ]
    assert found == []


def test_commands_import_at_the_top() -> None:
    """A command is imported when it is named, so nothing is gained by importing later; what needs
    torch is the exception."""
    found = [
        f"{where} imports {name} in a function"
        for where, tree in sources(ROOT / "cli")
        for name in late_imports(tree)
        if name != "eclip.varout.cuda.measure.measure_machine"
    ]
    assert found == []


def test_a_late_import_is_found() -> None:
    late = ast.parse("def f():\n    from eclip.planner import case\n    import torch")
    assert late_imports(late) == ["eclip.planner.case"]
    assert not says_why(late)
    assert not late_imports(ast.parse("from eclip.planner import case"))
