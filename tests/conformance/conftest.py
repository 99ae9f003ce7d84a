"""The devices, and which tests each of them is held to.

To add a device, add a Candidate to tests/support/benches.py. A test with ``needs(CAPABILITY)`` runs
on devices that have it and is skipped with its name on others; one with ``lacks(CAPABILITY)`` runs
on those others; one with ``modelled`` where time is a model's. What a device should pass and does
not is an expected failure of its Candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benches import CANDIDATES, Bench, Candidate


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "needs(capability): only devices that have it",
        "lacks(capability): only devices that do not have it",
        "modelled: only devices whose time is modelled",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        candidate, policy = (item.callspec.params.get(name) for name in ("candidate", "policy"))
        if not isinstance(candidate, Candidate):
            continue
        failures, test = candidate.expected_failures, item.originalname
        reason = failures.get(test) or failures.get(f"{test}[{policy}]")
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=f"{candidate.name}: {reason}", strict=True))


@pytest.fixture(scope="session")
def open_benches() -> Iterator[dict[str, Bench]]:
    """Those that were made so far, by their device's name."""
    with ExitStack() as stack:
        yield _Benches(stack)


class _Benches(dict[str, Bench]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, name: str) -> Bench:
        (wanted,) = (one for one in CANDIDATES if one.name == name)
        made: Bench = self._stack.enter_context(wanted.make())
        self[name] = made
        return made


@pytest.fixture(params=CANDIDATES, ids=lambda candidate: candidate.name)
def candidate(request: pytest.FixtureRequest) -> Candidate:
    found: Candidate = request.param
    if reason := found.missing():
        pytest.skip(f"{found.name}: {reason}")
    return found


@pytest.fixture
def bench(
    candidate: Candidate,
    open_benches: dict[str, Bench],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Bench:
    made = open_benches[candidate.name]
    has = made.device.capabilities
    for mark in request.node.iter_markers("needs"):
        (capability,) = mark.args
        if capability not in has:
            pytest.skip(f"{candidate.name} has no {capability.value}")
        if reason := candidate.host_lacks(capability):
            pytest.skip(f"{candidate.name}, {capability.value}: {reason}")
    for mark in request.node.iter_markers("lacks"):
        (capability,) = mark.args
        if capability in has:
            pytest.skip(f"{candidate.name} has {capability.value}")
    if request.node.get_closest_marker("modelled") and not made.device.modelled:
        pytest.skip(f"{candidate.name}: its time is real")
    made.use_its_clock(monkeypatch)
    return made
