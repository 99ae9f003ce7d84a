"""Batches between measured ones: totals on a line, the rest as modelled, files untouched."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eclip.core.calibration import Calibration
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import MismatchError
from eclip.files import store
from eclip.models.between import align
from eclip.models.library import find_profile
from eclip.models.modelled import model_names, model_profile
from eclip.models.synthetic import synthetic_profile

H200 = store.load_builtin("h200", Topology)
CALIBRATION = store.load_builtin("h200", Calibration)
MEASURED = (1, 8, 32)


def find(model: str, batch: int, *folders: Path) -> Profile:
    return find_profile(ModelKey(model, batch), H200, CALIBRATION, folders)


def modelled(model: str, batch: int) -> Profile:
    return model_profile(ModelKey(model, batch), H200, CALIBRATION)


def measured(batch: int, times: float = 1.0, seed: int = 1, model: str = "alexnet") -> Profile:
    """As if it had been measured, every kernel taking so many times as long."""
    profile = synthetic_profile(seed, 3, H200, name=model, batch=batch)
    busy = np.rint(np.array(profile.busy_ns) * times).astype(int)
    return msgspec.structs.replace(
        profile,
        modelled=False,
        busy_ns=tuple(map(tuple, busy.tolist())),
        request_ns=tuple((busy + np.array(profile.gap_ns)).sum(axis=0).tolist()),
    )


def busy_ns(profile: Profile) -> list[int]:
    return [sum(column) for column in zip(*profile.busy_ns, strict=True)]


@pytest.mark.parametrize("model", model_names())
def test_larger_batch_never_takes_less_time_on_any_size(model: str) -> None:
    known = {batch: find(model, batch) for batch in MEASURED}
    times = [
        (known.get(batch) or align(modelled(model, batch), list(known.values()))).request_ns
        for batch in range(1, 65)
    ]
    assert times[3] == find(model, 4).request_ns
    assert (np.diff(times, axis=0) >= 0).all()


@pytest.mark.parametrize("batch", [4, 20])
@pytest.mark.parametrize("model", ["bert", "gpt2", "shufflenet"])
def test_totals_are_on_the_line_between_the_measured_batches(model: str, batch: int) -> None:
    low, high = (1, 8) if batch < 8 else (8, 32)
    below, found, above = (find(model, one) for one in (low, batch, high))
    part = (batch - low) / (high - low)

    def line(of_below: tuple[int, ...], of_above: tuple[int, ...]) -> object:
        mixed = np.array(of_below) * (1 - part) + np.array(of_above) * part
        return pytest.approx(mixed.tolist(), abs=2)  # rounded

    assert list(found.request_ns) == line(below.request_ns, above.request_ns)
    assert list(found.energy_uj) == line(below.energy_uj, above.energy_uj)
    assert busy_ns(found) == line(tuple(busy_ns(below)), tuple(busy_ns(above)))
    kernels = len(found.trace.kernels)
    assert sum(found.l2_bytes) == pytest.approx(
        sum(below.l2_bytes) * (1 - part) + sum(above.l2_bytes) * part, abs=kernels
    )


def test_kernels_and_memory_stay_those_of_the_model() -> None:
    found, model = find("bert", 4), modelled("bert", 4)
    assert found.trace == model.trace and found.fingerprint == model.fingerprint
    assert (found.sizes, found.blocks_per_unit) == (model.sizes, model.blocks_per_unit)
    assert found.footprint == model.footprint
    assert all(d <= l2 for d, l2 in zip(found.dram_bytes, found.l2_bytes, strict=True))
    shares = [np.array(one.busy_ns)[:, -1] / busy_ns(one)[-1] for one in (found, model)]
    assert shares[0] == pytest.approx(shares[1], abs=1e-5)


def test_it_says_that_it_is_modelled_and_by_what_it_was_aligned() -> None:
    found = find("bert", 4)
    assert found.modelled
    assert found.source.startswith("Modelled from the architecture of bert")
    assert found.source.endswith("a straight line through the measured batches 1 and 8.")


@pytest.mark.parametrize("batch", MEASURED)
def test_measured_batch_is_its_file(batch: int) -> None:
    pack = Path(str(store.__file__)).parents[1] / "data" / "profiles" / "h200"
    assert find("bert", batch) == store.load(pack / f"bert-{batch}.json.gz", Profile)


def test_line_predicts_a_measured_batch_that_was_left_out_better_than_the_model() -> None:
    errors: dict[str, list[float]] = {"line": [], "model": []}
    for model in model_names():
        truth = np.array(find(model, 8).request_ns)
        plain = modelled(model, 8)
        line = align(plain, [find(model, 1), find(model, 32)])
        errors["line"] += (np.abs(np.array(line.request_ns) / truth - 1)).tolist()
        errors["model"] += (np.abs(np.array(plain.request_ns) / truth - 1)).tolist()
    assert np.mean(errors["line"]) < 0.05 < 0.2 < np.mean(errors["model"])
    assert max(errors["line"]) < 0.18


def test_one_measured_batch_gives_no_line() -> None:
    plain = modelled("alexnet", 4)
    assert align(plain, []) == plain
    assert align(plain, [measured(8)]) == plain


def test_order_of_the_measured_batches_does_not_matter() -> None:
    four, eight, sixteen = measured(4), measured(8, 2.0), measured(16, 3.0)
    plain = modelled("alexnet", 5)
    assert align(plain, [sixteen, four, eight]) == align(plain, [four, eight])


def pairs(low: int, high: int) -> st.SearchStrategy[list[int]]:
    batches = st.integers(low, high)
    return st.lists(batches, min_size=2, max_size=2, unique=True).map(sorted)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 30.0), pairs(1, 8) | pairs(16, 100))
def test_beyond_the_measured_batches_time_grows_and_no_more_than_the_batch(
    times: float, pair: list[int]
) -> None:
    """Also where the larger measured batch was faster, or slower than in proportion."""
    near = [measured(8), measured(16, times)]
    few, many = (align(modelled("alexnet", batch), near) for batch in pair)
    growth = pair[1] / pair[0]
    for before, after in zip(busy_ns(few), busy_ns(many), strict=True):
        assert 0 < before <= after
        assert after <= (before + 1) * growth + 1  # rounded


def test_gaps_do_not_grow_beyond_the_measured_batches() -> None:
    near = [measured(4), measured(8, 2.0, seed=2)]
    for batch, nearest in ((2, near[0]), (20, near[1])):
        found = align(modelled("alexnet", batch), near)
        assert np.array(found.gap_ns).sum(axis=0).tolist() == (
            np.array(nearest.gap_ns).sum(axis=0).tolist()
        )


def test_what_was_not_measured_stays_modelled() -> None:
    plain = modelled("alexnet", 5)
    uncounted = msgspec.structs.replace(measured(4), dram_bytes=(0,) * 3, l2_bytes=(0,) * 3)
    found = align(plain, [uncounted, measured(8, 2.0)])
    assert (found.dram_bytes, found.l2_bytes) == (plain.dram_bytes, plain.l2_bytes)
    assert found.energy_uj == ()
    assert found.request_ns != plain.request_ns


# --- Which files count


def test_measured_file_of_the_user_comes_before_the_built_in_one(tmp_path: Path) -> None:
    own = measured(8, 100.0)
    store.save(own, tmp_path / "alexnet-8.json.gz")
    below, found = find("alexnet", 1), find("alexnet", 4, tmp_path)
    middle = np.array(below.request_ns) * 4 / 7 + np.array(own.request_ns) * 3 / 7
    assert found.request_ns == pytest.approx(middle.tolist(), abs=2)


def test_modelled_file_of_another_batch_does_not_count(tmp_path: Path) -> None:
    before = find("alexnet", 4)
    store.save(synthetic_profile(1, 3, H200, name="alexnet", batch=5), tmp_path / "alexnet-5.json")
    assert find("alexnet", 4, tmp_path) == before


def test_file_with_other_sizes_or_an_impossible_batch_does_not_count(tmp_path: Path) -> None:
    before = find("alexnet", 4)
    few = synthetic_profile(1, 3, H200, name="alexnet", batch=5, sizes=(64, 132))
    store.save(msgspec.structs.replace(few, modelled=False), tmp_path / "alexnet-5.json")
    for name in ("alexnet-0.json", "alexnet-99999.json", "alexnet-5x.json", "xalexnet-6.json"):
        (tmp_path / name).write_text("not looked into")
    assert find("alexnet", 4, tmp_path) == before


def test_measured_file_of_another_device_is_refused(tmp_path: Path) -> None:
    mi50 = store.load_builtin("mi50", Topology)
    store.save(synthetic_profile(1, 3, mi50, name="alexnet", batch=5), tmp_path / "alexnet-5.json")
    with pytest.raises(MismatchError, match="different devices: units 60 against 132"):
        find("alexnet", 4, tmp_path)
