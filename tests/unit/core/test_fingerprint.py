"""What artefacts were made for: hard parts of a fingerprint must match, soft ones warn."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from artefacts import PROFILE, TOPOLOGY
from eclip.errors import MismatchError


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"units": 12, "slice_units": (6, 6)}, "units 8 against 12"),
        ({"slice_units": (4, 4)}, "slices (2, 2, 4) against (4, 4)"),
        ({"compute": "8.0"}, "compute capability 9.0 against 8.0"),
        ({"traces": {"m:2": "0" * 64}}, "different kernels for m:2"),
    ],
)
def test_hard_part_of_a_fingerprint_must_match(changes: dict[str, Any], fault: str) -> None:
    other = msgspec.structs.replace(PROFILE.fingerprint, **changes)
    with pytest.raises(MismatchError) as caught:
        PROFILE.fingerprint.check(other, "the profile", "the plan")
    assert fault in str(caught.value)
    assert "make the profile again" in str(caught.value)


def test_soft_part_of_a_fingerprint_may_differ_with_a_warning() -> None:
    mine = msgspec.structs.replace(
        PROFILE.fingerprint, driver="1", device="A", libraries={"torch": "2.0", "cudnn": "9"}
    )
    same = mine.check(mine, "it", "that")
    other = msgspec.structs.replace(
        mine, driver="2", device="B", libraries={"torch": "2.1", "numpy": "2"}
    )
    found = mine.check(other, "the profile", "the plan")
    assert same == ()
    assert [warning.split(" with ")[1].split(" ")[0] for warning in found] == [
        "driver",
        "device",
        "torch",
    ]
    assert all("the profile" in warning and "the plan" in warning for warning in found)


def test_what_only_one_side_knows_is_not_compared() -> None:
    stranger = msgspec.structs.replace(TOPOLOGY.fingerprint, traces={"other:1": "1"}, device="")
    assert PROFILE.fingerprint.check(stranger, "it", "that") == ()
