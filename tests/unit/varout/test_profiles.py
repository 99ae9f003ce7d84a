"""Lengths in traces and profiles: optional, validated, and what planning and simulation use."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import pytest

from eclip.core.lengths import Lengths, lengths_of
from eclip.core.mix import mix_of
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.core.trace import Kernel, KernelLengths, Trace
from eclip.errors import UsageError
from eclip.files import store
from eclip.files.machine import Machine
from eclip.models.library import file_of
from eclip.models.synthetic import synthetic_profile
from eclip.planner.policies import make_plan
from eclip.planner.problem import Problem
from eclip.varout.mechanisms import Mechanism
from eclip.varout.profiles import STAGE_KERNELS, annotate, stage_kernels

CAPACITY = 10_000
KERNELS = re.compile(r"__global__[^(]*(?:__launch_bounds__\([^)]*\))?\s*(eclip_\w+)\(")


def test_every_kernel_of_the_sources_is_known_as_a_stages() -> None:
    files = resources.files("eclip.varout.cuda").iterdir()
    sources = [file.read_text() for file in files if file.name.endswith(".cu")]
    found = {name for source in sources for name in KERNELS.findall(source)}
    assert len(found) == sum(source.count("__global__") for source in sources)
    assert found == STAGE_KERNELS


@pytest.fixture
def profile(h200: Topology) -> Profile:
    return synthetic_profile(0, 12, h200, name="varying")


@pytest.fixture(scope="module")
def machine() -> Machine:
    return store.load_builtin("h200", Machine)


@pytest.fixture(scope="module")
def lengths() -> Lengths:
    return lengths_of([5_000] * 97 + [200_000] * 3)


def test_traces_without_lengths_are_what_they_were(profile: Profile) -> None:
    """Files of before are read, and digests do not change."""
    shipped = sorted((Path(store.__file__).parents[1] / "data" / "profiles" / "h200").glob("*.gz"))
    assert store.load(shipped[0], Profile).trace.lengths == ()
    with_lengths = msgspec.structs.replace(
        profile.trace, lengths=(KernelLengths(kernel=3, lengths=lengths_of([1])),)
    )
    assert with_lengths.digest == profile.trace.digest


def test_annotated_profiles_close_and_are_written_and_read(
    profile: Profile, machine: Machine, lengths: Lengths, tmp_path: Path
) -> None:
    made = annotate(profile, lengths, machine, Mechanism.SWAP, CAPACITY, 5_000, [2, 5])
    store.save(made, tmp_path / "p.json")
    assert store.load(tmp_path / "p.json", Profile) == made
    assert [one.kernel for one in made.trace.lengths] == [2, 5]
    for size in range(len(made.sizes)):
        assert made.busy_ns[2][size] >= profile.busy_ns[2][size]  # some requests are longer
        assert made.tail_ns[0][size] > made.busy_ns[2][size]
        assert made.busy_ns[3] == profile.busy_ns[3]
    tail = made.at_tail()
    assert tail.busy_ns[5] == made.tail_ns[1]
    assert all(np.array(tail.request_ns) > np.array(made.request_ns))
    assert profile.at_tail() is profile


def test_planning_uses_expected_or_tail_times(
    profile: Profile, machine: Machine, lengths: Lengths, h200: Topology
) -> None:
    made = annotate(profile, lengths, machine, Mechanism.SWAP, CAPACITY, 5_000, [2, 5])
    mix = mix_of([made.model])

    def predicted(one: Profile) -> int:
        plan = make_plan("shared", Problem(mix, h200, (one,)))
        return sum(group.predicted_ns for group in plan.main.assignments[0].groups)

    assert predicted(made.at_tail()) > predicted(made) > 0


def test_simulation_uses_expected_or_tail_times(
    profile: Profile, machine: Machine, lengths: Lengths, tmp_path: Path, h200: Topology,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import json
    import sys

    from eclip.cli import main

    made = annotate(profile, lengths, machine, Mechanism.SWAP, CAPACITY, 5_000, [2, 5])
    store.save(made, file_of(tmp_path, made.model))
    rates = []
    for extra in ([], ["--set", "tail=yes"]):
        arguments = [
            "compare",
            str(made.model),
            "--policies",
            "shared",
            "--profiles",
            str(tmp_path),
        ]
        monkeypatch.setattr(
            sys, "argv", ["eclip", *arguments, "--seconds", "0.2", "--json", *extra]
        )
        with pytest.raises(SystemExit):
            main()
        found = json.loads(capsys.readouterr().out)
        rates.append(found["policies"][0]["workers"][0]["rate_rps"])
    assert rates[1] < rates[0]


def test_stage_kernels_are_found_by_name() -> None:
    def kernel(name: str) -> Kernel:
        return Kernel(name=name, grid=(1, 1, 1), block=(1, 1, 1))

    trace = Trace(
        model=ModelKey("m", 1),
        kernels=tuple(map(kernel, ["gemm", "eclip_select", "relu", "eclip_route"])),
    )
    assert stage_kernels(trace) == [1, 3]


def test_what_cannot_be_annotated_says_so(
    profile: Profile, machine: Machine, lengths: Lengths
) -> None:
    def attempt(one: Profile, where: Machine, kernels: list[int] | None) -> Profile:
        return annotate(one, lengths, where, Mechanism.SWAP, CAPACITY, 5_000, kernels)

    with pytest.raises(UsageError, match="no variable-output kernels at"):
        attempt(profile, machine, [99])
    with pytest.raises(UsageError, match="name their positions"):
        attempt(profile, machine, None)
    with pytest.raises(UsageError, match="no GPU"):
        attempt(profile, store.load_builtin("imagine", Machine), [1])
    with pytest.raises(UsageError, match="already"):
        attempt(attempt(profile, machine, [1]), machine, [1])


def test_lengths_and_tails_that_do_not_fit_are_refused(
    profile: Profile, machine: Machine, lengths: Lengths
) -> None:
    one = KernelLengths(kernel=99, lengths=lengths)
    with pytest.raises(ValueError, match="name kernels"):
        msgspec.structs.replace(profile.trace, lengths=(one,))
    made = annotate(profile, lengths, machine, Mechanism.SWAP, CAPACITY, 5_000, [1])
    with pytest.raises(ValueError, match="tail_ns"):
        msgspec.structs.replace(made, tail_ns=made.tail_ns + made.tail_ns)


def test_a_request_that_cannot_be_traced_is_shared_out_evenly() -> None:
    from eclip.models.spans import even_shares

    busy, gap, spread = even_shares([1000.0, 400.0, 1.0], 4)
    assert busy.sum(axis=0).tolist() == [1000, 400, 4]  # every kernel is busy for a nanosecond
    assert gap.sum() == spread.sum() == 0
