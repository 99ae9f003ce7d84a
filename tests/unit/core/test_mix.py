"""The mix grammar: what it means, what it refuses, and that a refusal is always a UsageError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eclip.core.mix import (
    DEFAULT_BATCH,
    MAX_WORKERS,
    PAPER_MIXES,
    Mix,
    MixWorker,
    mix_of,
    parse_mix,
    with_tiers,
)
from eclip.core.model_key import MAX_BATCH, ModelKey, parse_model
from eclip.errors import UsageError

ASCII = st.characters(max_codepoint=127)


def read(text: str) -> list[tuple[str, str, float | None]]:
    return [(worker.name, str(worker.model), worker.rate_rps) for worker in parse_mix(text).workers]


def test_repeat_model_batch_and_rate_are_read() -> None:
    assert read("2xalbert:8,densenet201:16@120rps") == [
        ("albert.1", "albert:8", None),
        ("albert.2", "albert:8", None),
        ("densenet201", "densenet201:16", 120.0),
    ]


def test_batch_is_8_and_the_loop_closed_unless_told() -> None:
    assert DEFAULT_BATCH == 8
    assert read("vgg19") == [("vgg19", "vgg19:8", None)]


def test_rate_may_have_a_fraction_and_applies_to_every_repeat() -> None:
    assert read("2xa@0.5rps") == [("a.1", "a:8", 0.5), ("a.2", "a:8", 0.5)]


def test_spaces_around_parts_do_not_matter() -> None:
    assert read("  albert:8 ,  vgg19 ") == read("albert:8,vgg19")
    assert parse_mix(" paper/2 ") == parse_mix("paper/2")


def test_models_with_dots_dashes_and_an_x_are_models() -> None:
    assert [key for _, key, _ in read("xlnet,x2,vit-b_16.v2:4")] == [
        "xlnet:8",
        "x2:8",
        "vit-b_16.v2:4",
    ]


def test_repeated_models_are_numbered_across_parts_and_batches() -> None:
    names = [name for name, _, _ in read("albert:8,vgg19,2xalbert:16,vgg19:1,alexnet")]
    assert names == ["albert.1", "vgg19.1", "albert.2", "albert.3", "vgg19.2", "alexnet"]


def test_mix_of_models_is_the_mix_that_its_name_means() -> None:
    mix = mix_of([ModelKey("albert", 8), ModelKey("albert", 8), ModelKey("vgg19", 4)])
    assert mix == parse_mix("albert:8,albert:8,vgg19:4")


def test_kernels_for_fewer_units_are_part_of_a_model_but_not_of_what_it_serves() -> None:
    mix = parse_mix("2xalbert~66:8,albert:8@30rps,package.module:factory~40:2")
    assert [(worker.name, str(worker.model)) for worker in mix.workers] == [
        ("albert.1", "albert~66:8"),
        ("albert.2", "albert~66:8"),
        ("albert.3", "albert:8"),
        ("package.module:factory", "package.module:factory~40:2"),
    ]
    assert [str(model.usual) for model in mix.models] == [
        *["albert:8"] * 3,
        "package.module:factory:2",
    ]


def test_model_is_split_into_what_it_serves_and_its_units_and_put_together_again() -> None:
    assert parse_model("albert:8") == ModelKey("albert", 8)
    assert parse_model(" a:f~7:2 ") == ModelKey("a:f", 2, 7)
    usual, for_66, for_33 = (parse_model(f"albert{kernels}:8") for kernels in ("", "~66", "~33"))
    assert usual.with_kernels_for(66) == for_33.with_kernels_for(66) == for_66
    assert for_33.with_kernels_for(0) == for_33.usual == usual == usual.usual
    assert (for_66.title, usual.title) == ("albert~66", "albert")


@given(
    name=st.from_regex(r"[A-Za-z][\w.-]{0,9}(:[A-Za-z_]\w{0,9})?", fullmatch=True, alphabet=ASCII),
    batch=st.integers(1, MAX_BATCH),
    kernels_for=st.integers(0, 999_999),
)
def test_every_key_is_read_again_from_its_text(name: str, batch: int, kernels_for: int) -> None:
    key = ModelKey(name, batch, kernels_for)
    assert parse_model(str(key)) == key
    assert mix_of([key]).models == parse_mix(str(key)).models == (key,)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("", 8), "is not a model's name"),
        (("albert~66", 8), "is not a model's name"),
        (("albert", 0), "must be 1 to 65536, not 0"),
        (("albert", MAX_BATCH + 1), "must be 1 to 65536"),
        (("albert", 8, -1), "cannot be chosen for -1 units"),
    ],
)
def test_key_out_of_its_limits_is_refused(values: tuple[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelKey(*values)


@pytest.mark.parametrize(
    "model", ["albert~", "albert~x", "albert~0", "albert~066", "albert~1000000", "albert~6_6"]
)
def test_what_follows_a_tilde_is_a_number_of_units_or_refused(model: str) -> None:
    with pytest.raises(UsageError, match=rf"'{model}:8' is not model:batch, .* or albert~66:8"):
        parse_mix(f"vgg19,2x{model}:8@30rps")
    with pytest.raises(ValueError, match="is not a model's name"):
        ModelKey(model, 8)


@pytest.mark.parametrize(
    "text", ["~66:8", "albert~66~33", "albert:8~66", "albert~-1", "albert~66-"]
)
def test_tilde_stands_between_a_model_and_its_units(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 2xalbert:8"):
        parse_mix(text)


@pytest.mark.parametrize("model", ["~66", "albert~66~33", "albert~٦٦", "albert~-1"])
def test_model_that_no_mix_can_have_is_refused_where_it_is_split(model: str) -> None:
    with pytest.raises(UsageError, match="or albert~66:8 for kernels chosen for 66 units"):
        parse_model(f"{model}:8")


def test_mix_with_other_kernels_is_as_asked_by_its_name() -> None:
    asked = parse_mix("paper/2")
    albert, densenet = asked.workers
    chosen = [msgspec.structs.replace(albert, model=albert.model.with_kernels_for(66)), densenet]
    assert Mix(name="paper/2", workers=tuple(chosen)).as_asked() == asked
    named = parse_mix("albert~66:8,vgg19:8")
    assert named.as_asked() == named


def test_mix_whose_name_does_not_say_what_it_serves_is_as_it_is() -> None:
    workers = parse_mix("albert~66:8,vgg19:8").workers
    for name in ("by hand", "albert:8", "albert:4,vgg19:8", "vgg19:8,albert:8"):
        mix = Mix(name=name, workers=workers)
        assert mix.as_asked() is mix


@pytest.mark.parametrize(
    ("number", "models"),
    [
        (1, ["albert", "albert", "densenet201"]),
        (2, ["albert", "densenet201"]),
        (3, ["albert", "densenet201", "vgg19"]),
        (4, ["alexnet", "resnet152", "vgg19"]),
        (5, ["resnext101", "shufflenet"]),
        (6, ["densenet201", "densenet201"]),
        (7, ["alexnet", "alexnet", "alexnet"]),
    ],
)
def test_paper_mixes_are_those_of_table_1(number: int, models: list[str]) -> None:
    mix = parse_mix(f"paper/{number}")
    assert mix.name == f"paper/{number}"
    assert list(mix.models) == [ModelKey(model, 8) for model in models]
    assert {worker.rate_rps for worker in mix.workers} == {None}


@pytest.mark.parametrize("name", ["paper/0", "paper/8", "paper/", "paper/1,albert", "paper/01"])
def test_unknown_paper_mix_lists_the_right_ones(name: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_mix(name)
    assert all(known in str(refusal.value) for known in PAPER_MIXES)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        ",",
        "albert,",
        ",albert",
        "albert,,vgg19",
        "2x",
        "2 x albert",
        "2xalbert:",
        "albert:8:8",
        "albert:-1",
        "albert:8.0",
        "albert@rps",
        "albert@120",
        "albert@-1rps",
        "albert@1e3rps",
        "albert@nanrps",
        "albert@.5rps",
        "-1xalbert",
        "8",
        "2xalbert;vgg19",
        "al bert",
        "albert\nvgg19",
        "PAPER/1",
        "../etc/passwd",
        "albert:٨",
        "٢xalbert",
        "albert@٣rps",
        "albert:²",
    ],
)
def test_what_is_no_mix_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="write it like 2xalbert:8"):
        parse_mix(text)


@pytest.mark.parametrize("text", ["0xalbert", "albert@0rps", "albert@0.0rps"])
def test_nothing_starts_at_0(text: str) -> None:
    with pytest.raises(UsageError, match="start above 0"):
        parse_mix(text)


@pytest.mark.parametrize("batch", ["0", "65537", "999999999999"])
def test_batch_that_no_model_has_is_refused_with_the_range(batch: str) -> None:
    with pytest.raises(UsageError, match=f"batch of albert must be 1 to 65536, not {batch}"):
        parse_mix(f"albert:{batch}")


def test_32_workers_are_enough_for_anybody() -> None:
    assert len(parse_mix(f"{MAX_WORKERS}xalbert").workers) == MAX_WORKERS == 32
    for text in ("33xalbert", "999999xalbert", "20xalbert,13xvgg19", ",".join(["a"] * 33)):
        with pytest.raises(UsageError, match="more than 32 workers"):
            parse_mix(text)
    with pytest.raises(UsageError):
        parse_mix("99999999999999999999xalbert")


def test_name_that_a_repeat_would_give_too_is_refused() -> None:
    with pytest.raises(UsageError):
        parse_mix("2xalbert,albert.1")


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30) | st.text("0123456789xal:@rps.,-/~ ", max_size=30))
@example("2xa,a.2")
@example("x" * 100_000)
def test_any_text_is_a_mix_or_a_usage_error(text: str) -> None:
    try:
        mix = parse_mix(text)
    except UsageError:
        return
    names = [worker.name for worker in mix.workers]
    assert len(set(names)) == len(names)
    assert all(1 <= model.batch <= MAX_BATCH for model in mix.models)
    assert all(worker.rate_rps is None or worker.rate_rps > 0 for worker in mix.workers)


def test_mix_without_workers_or_with_one_name_twice_is_refused() -> None:
    worker = MixWorker(name="a", model=ModelKey("a", 1))
    with pytest.raises(ValueError, match="1 to 32 workers, not 0"):
        Mix(name="", workers=())
    with pytest.raises(ValueError, match="one name"):
        Mix(name="", workers=(worker, worker))


@pytest.mark.parametrize(
    "worker",
    [
        {"name": "a", "model": {"name": "a", "batch": 0}},
        {"name": "a", "model": {"name": "a", "batch": 1}, "rate_rps": 0},
        {"name": "a", "model": {"name": "a", "batch": 1}, "rate_rps": -3},
        {"name": "a", "model": {"name": "a~x", "batch": 1}},
        {"name": "a", "model": {"name": "a", "batch": 1, "kernels_for": -1}},
        {"name": "a", "model": "a:1"},
    ],
)
def test_worker_in_a_file_keeps_the_limits_of_the_grammar(worker: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(worker, MixWorker)


# --- Tiers by name ----------------------------------------------------------------------------


def test_tiers_are_those_of_the_mix_that_says_the_same() -> None:
    tiers = {"a": "300rps/5ms", "b": "background/floor=0.2/weight=2"}
    given = with_tiers(parse_mix("a:1,b:8,c:2"), tiers)
    assert given == parse_mix("a:1@300rps/5ms,b:8@background/floor=0.2/weight=2,c:2")


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        ({"z": "background"}, "unknown model 'z'"),
        ({"a": "soon"}, "cannot read"),
        ({"a": "5rps/1ms,b:1"}, "give a single tier"),
        ({"a": "5rps/0ms"}, "above 0"),
    ],
)
def test_tier_that_means_nothing_is_refused(tiers: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_tiers(parse_mix("a:1,b:8"), tiers)
