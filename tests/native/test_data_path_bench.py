"""What the bench of the server's data path starts: servers on the stand-in driver."""

from __future__ import annotations

from lab.serving import data_path

from native_build import Native


def test_every_part_of_the_way_is_measured(native: Native) -> None:
    found = data_path.measure(40, 1000.0)
    assert len(found) == 5 + 3 * len(data_path.CLIENTS) * len(data_path.SIZES)
    assert all(us > 0 for us in found.values())
