"""The recorder's promises: the fewest edges that keep the order of barriers."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from eclip.gpu.commands import Recorder

BARRIER = -1


class Nodes:
    """A sink that numbers nodes and keeps what each depends on."""

    def __init__(self) -> None:
        self.after: list[tuple[int, ...]] = []
        self.commands: dict[int, int] = {}  # node of each command

    def command(self, command: int, after: Sequence[int]) -> int:
        self.commands[command] = self.join(after)
        return self.commands[command]

    def join(self, after: Sequence[int]) -> int:
        self.after.append(tuple(after))
        return len(self.after) - 1


def record(steps: Sequence[int]) -> Nodes:
    nodes = Nodes()
    recorder = Recorder(nodes)
    for step in steps:
        if step == BARRIER:
            recorder.barrier()
        else:
            recorder.command(step)
    return nodes


def before(nodes: Nodes, node: int) -> set[int]:
    found: set[int] = set()
    open_nodes = [node]
    while open_nodes:
        for other in nodes.after[open_nodes.pop()]:
            if other not in found:
                found.add(other)
                open_nodes.append(other)
    return found


def test_a_barrier_after_one_command_is_that_command() -> None:
    assert record([0, BARRIER, 1]).after == [(), (0,)]


def test_a_barrier_after_several_is_one_joining_node() -> None:
    assert record([0, 1, 2, BARRIER, 3, 4]).after == [(), (), (), (0, 1, 2), (3,), (3,)]


def test_a_barrier_with_nothing_open_changes_nothing() -> None:
    nodes = record([BARRIER, 0, BARRIER, BARRIER, 1, BARRIER])
    assert nodes.after == [(), (0,)]


def test_hundreds_of_open_nodes_are_joined() -> None:
    nodes = record([*range(500), BARRIER, 500])
    assert len(nodes.after[500]) == 500
    assert before(nodes, nodes.commands[500]) == set(range(501))


@given(st.lists(st.booleans(), max_size=40))
def test_a_command_depends_on_all_before_the_last_barrier_and_on_nothing_since(
    commands: list[bool],
) -> None:
    steps = [index if is_command else BARRIER for index, is_command in enumerate(commands)]
    nodes = record(steps)
    for at, step in enumerate(steps):
        if step == BARRIER:
            continue
        last = max((index for index in range(at) if steps[index] == BARRIER), default=0)
        expected = {nodes.commands[other] for other in steps[:last] if other != BARRIER}
        found = before(nodes, nodes.commands[step])
        assert found & set(nodes.commands.values()) == expected
