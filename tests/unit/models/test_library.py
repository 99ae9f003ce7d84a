"""The profile library: the first match wins, and a file that does not belong is refused."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from eclip.core.calibration import Calibration
from eclip.core.model_key import ModelKey, parse_model
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.errors import ArtefactError, MismatchError, UsageError
from eclip.files import store
from eclip.models.library import find_others, find_profile
from eclip.models.modelled import model_names, model_profile
from eclip.models.synthetic import synthetic_profile

H200 = store.load_builtin("h200", Topology)
CALIBRATION = store.load_builtin("h200", Calibration)


def find(model: str, *folders: Path, batch: int = 8) -> Profile:
    return find_profile(parse_model(f"{model}:{batch}"), H200, CALIBRATION, folders)


def save_synthetic(path: Path, seed: int, model: str = "alexnet", batch: int = 8) -> Profile:
    profile = synthetic_profile(seed, 3, H200, name=model, batch=batch)
    store.save(profile, path)
    return profile


def test_without_files_the_profile_is_modelled(tmp_path: Path) -> None:
    a100 = store.load_builtin("a100", Topology), store.load_builtin("a100", Calibration)
    model = ModelKey("alexnet", 3)
    assert find_profile(model, *a100, [tmp_path]) == model_profile(model, *a100)


def test_measured_pack_of_the_h200_covers_all_models_at_batch_8() -> None:
    for model in model_names():
        profile = find(model)
        assert not profile.modelled
        assert any(profile.dram_bytes) and any(profile.l2_bytes)
        assert len(profile.energy_uj) == len(profile.sizes) == len(H200.lane_sizes)
        assert set(profile.slowdown_beside) == {"dram", "l2"}


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_file_of_the_user_comes_before_the_model(tmp_path: Path, suffix: str) -> None:
    saved = save_synthetic(tmp_path / f"alexnet-8{suffix}", seed=1)
    assert find("alexnet", tmp_path) == saved


def test_earlier_folder_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, folder in enumerate((first, second)):
        folder.mkdir()
        save_synthetic(folder / "alexnet-8.json", seed)
    assert find("alexnet", second, first).source.endswith("seed 1.")


def test_built_in_pack_comes_after_the_users_folders_and_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, pack = tmp_path / "mine", tmp_path / "data" / "profiles" / "h200"
    for folder in (mine, pack):
        folder.mkdir(parents=True)
    built_in = save_synthetic(pack / "alexnet-8.json.gz", seed=1)
    monkeypatch.setattr("eclip.models.library.resources.files", lambda package: tmp_path)
    assert find("alexnet", mine) == built_in
    own = save_synthetic(mine / "alexnet-8.json.gz", seed=2)
    assert find("alexnet", mine) == own


def test_file_for_another_batch_is_passed_over(tmp_path: Path) -> None:
    save_synthetic(tmp_path / "alexnet-4.json", seed=1, batch=4)
    assert find("alexnet", tmp_path, batch=5).source.startswith("Modelled")


def test_file_may_hold_a_model_eclip_does_not_know(tmp_path: Path) -> None:
    saved = save_synthetic(tmp_path / "my-net-8.json", seed=1, model="my-net")
    assert find("my-net", tmp_path) == saved


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    save_synthetic(tmp_path / "alexnet-8.json", seed=1, model="vgg19")
    with pytest.raises(MismatchError, match="vgg19:8, not of alexnet:8"):
        find("alexnet", tmp_path)


def test_file_for_another_device_is_refused(tmp_path: Path) -> None:
    mi50 = store.load_builtin("mi50", Topology)
    store.save(synthetic_profile(1, 3, mi50, name="alexnet", batch=8), tmp_path / "alexnet-8.json")
    with pytest.raises(MismatchError, match="different devices: units 60 against 132"):
        find("alexnet", tmp_path)


def test_damaged_file_is_refused_rather_than_passed_over(tmp_path: Path) -> None:
    (tmp_path / "alexnet-8.json").write_text("{")
    with pytest.raises(ArtefactError, match=r"alexnet-8\.json"):
        find("alexnet", tmp_path)


def test_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere"):
        find("alexnet", tmp_path / "nowhere")


def test_unknown_model_is_refused_with_all_that_is_there(tmp_path: Path) -> None:
    save_synthetic(tmp_path / "my-net-4.json.gz", seed=1, model="my-net", batch=4)
    (tmp_path / "notes.txt").write_text("not a profile")
    with pytest.raises(UsageError, match=r"unknown model 'my-net'.*vit_b_16, my-net:4$"):
        find("my-net", tmp_path)


# --- Kernels chosen for fewer units


def others(model: str, *folders: Path, batch: int = 8) -> list[Profile]:
    return find_others(parse_model(f"{model}:{batch}"), H200, folders)


def test_other_kernels_are_those_of_the_folder_that_has_the_own_ones(tmp_path: Path) -> None:
    mine, more = tmp_path / "mine", tmp_path / "more"
    for folder in (mine, more):
        folder.mkdir()
    save_synthetic(mine / "alexnet-8.json.gz", seed=1)
    save_synthetic(more / "alexnet-8.json.gz", seed=2)
    save_synthetic(more / "alexnet~66-8.json.gz", seed=3, model="alexnet~66")
    assert others("alexnet", mine, more) == []
    (found,) = others("alexnet", more, mine)
    assert found.model == ModelKey("alexnet", 8, 66)


def test_pack_has_other_kernels_that_differ_from_the_own_ones() -> None:
    for model in ("albert", "bert", "gpt2", "vit_b_16"):
        (other,) = others(model)
        assert other.model == ModelKey(model, 8, 66) and not other.modelled
        assert other.trace.digest != find(model).trace.digest
    assert others("densenet201") == []  # it multiplies no matrices to speak of


def test_usual_traffic_is_the_mean_of_the_models_that_were_counted() -> None:
    """In every moment that a kernel is busy, of the pack's models at batch 8 on all units."""
    dram, l2 = [], []
    for model in model_names():
        profile = find(model)
        assert any(profile.l2_bytes) and not profile.modelled
        busy_s = profile.busy_at(H200.units).sum() / 1e9
        dram.append(sum(profile.dram_bytes) / busy_s)
        l2.append(sum(profile.l2_bytes) / busy_s)
    assert len(l2) == 16
    memory = CALIBRATION.memory
    assert memory.usual_dram_bytes_per_s == pytest.approx(statistics.fmean(dram), rel=0.01)
    assert memory.usual_l2_bytes_per_s == pytest.approx(statistics.fmean(l2), rel=0.01)


def test_own_profile_of_the_user_hides_the_other_kernels_of_the_pack(tmp_path: Path) -> None:
    save_synthetic(tmp_path / "albert-8.json.gz", seed=1, model="albert")
    assert others("albert", tmp_path) == []
    assert [one.model for one in others("bert", tmp_path)] == [ModelKey("bert", 8, 66)]


def test_all_numbers_of_units_are_found_in_order_and_nothing_else(tmp_path: Path) -> None:
    save_synthetic(tmp_path / "alexnet-8.json.gz", seed=0)
    for seed, units in enumerate((100, 66, 8), 1):
        save_synthetic(tmp_path / f"alexnet~{units}-8.json", seed, model=f"alexnet~{units}")
    newer = save_synthetic(tmp_path / "alexnet~66-8.json.gz", seed=9, model="alexnet~66")
    for name in ("alexnet~66-4", "alexnet~old-8", "alexnet~066-8", "alexnet~-8", "alexnet~66-1-8"):
        (tmp_path / f"{name}.json.gz").write_text("not looked into")
    (tmp_path / "xalexnet~66-8.json").write_text("not looked into")
    found = others("alexnet", tmp_path)
    assert [str(one.model) for one in found] == ["alexnet~8:8", "alexnet~66:8", "alexnet~100:8"]
    assert found[1] == newer  # .json.gz comes first, as for a model's own


def test_model_that_names_its_kernels_or_is_modelled_has_no_others(tmp_path: Path) -> None:
    assert others("albert~66") == []
    save_synthetic(tmp_path / "alexnet~66-3.json.gz", seed=1, model="alexnet~66", batch=3)
    assert others("alexnet", tmp_path, batch=3) == []


def test_other_kernels_in_a_damaged_or_wrong_file_are_refused(tmp_path: Path) -> None:
    save_synthetic(tmp_path / "albert-8.json.gz", seed=1, model="albert")
    path = tmp_path / "albert~66-8.json.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(ArtefactError, match=r"albert~66-8\.json\.gz"):
        others("albert", tmp_path)
    path.unlink()
    save_synthetic(path, seed=2, model="albert~33")
    with pytest.raises(MismatchError, match="albert~33:8, not of albert~66:8"):
        others("albert", tmp_path)
    mi50 = store.load_builtin("mi50", Topology)
    store.save(synthetic_profile(1, 3, mi50, name="albert~66", batch=8), path)
    with pytest.raises(MismatchError, match="different devices"):
        others("albert", tmp_path)


def test_kernels_without_a_profile_are_not_modelled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"measure it: eclip profile alexnet~40:8 -o profiles"):
        find("alexnet~40", tmp_path)
    saved = save_synthetic(tmp_path / "alexnet~40-8.json.gz", seed=1, model="alexnet~40")
    assert find("alexnet~40", tmp_path) == saved


@pytest.mark.parametrize("units", [132, 999999])
def test_kernels_for_as_many_units_as_there_are_or_more_are_refused(units: int) -> None:
    with pytest.raises(UsageError, match=rf"albert~{units}:8: .* has 132 SMs; give a smaller"):
        find(f"albert~{units}")


def test_unknown_model_is_not_answered_with_other_kernels_of_known_ones(tmp_path: Path) -> None:
    (tmp_path / "albert~old-8.json.gz").touch()
    with pytest.raises(UsageError, match=r"unknown model 'my-net~66'.*vit_b_16$"):
        find("my-net~66", tmp_path)


@pytest.mark.parametrize("key", ["albert~:8", "albert~x:8", "~66:8"])
def test_key_with_a_senseless_number_of_units_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="or albert~66:8 for kernels chosen for 66 units"):
        parse_model(key)
