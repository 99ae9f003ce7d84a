"""The configuration of a server: what is read, and how what is wrong is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eclip.core.mix import read_bound
from eclip.errors import UsageError
from eclip.server.config import ServerSettings, check_workers, make_config, read_config
from served_core import ADD, DIGITS

EXAMPLES = Path(__file__).parents[3] / "examples" / "serving"
GOOD = """
[server]
http_port = 9000
fronts = 2

[[service]]
name = "bert"
model = "bert"
bound = "1.5x"
rate = 300

[[service]]
name = "batch"
model = "vgg19"
tier = "background"
floor = 0.2
batches = [8, 32]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, GOOD))
    assert config.server == ServerSettings(http_port=9000, fronts=2)
    bert, batch = config.services
    assert bert.promised is not None and bert.promised.times_alone == 1.5
    assert (batch.tier, batch.floor, batch.batches) == ("background", 0.2, (8, 32))
    assert config.server.host == "127.0.0.1"  # nobody else may ask unless told


def test_a_mark_of_byte_order_is_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff" + GOOD)
    assert read_config(path).server.http_port == 9000


def test_a_mix_is_a_configuration() -> None:
    config = read_config("bert:1@300rps/5ms,2xvgg19:32@background/floor=0.1")
    assert [service.name for service in config.services] == ["bert", "vgg19.1", "vgg19.2"]
    assert config.services[0].bound == "5ms" and config.services[0].rate == 300
    assert config.services[1].batches == (32,) and config.services[1].floor == 0.1
    assert len(read_config("paper/3").services) == 3


@pytest.mark.parametrize(
    ("text", "bound_ms"), [("5ms", 5.0), ("0.5s", 500.0), ("250us", 0.25), ("1.5ms", 1.5)]
)
def test_bounds_have_units(text: str, bound_ms: float) -> None:
    assert read_bound(text).ms == bound_ms


def bad(**changes: Any) -> dict[str, Any]:
    return {"service": [{**DIGITS, **changes}]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"service: at least one"),
        ({"services": []}, r"unknown key 'services'; did you mean service\? choose one of"),
        ({"server": {"port": 1}, "service": [ADD]}, r"server: unknown key 'port'"),
        ({"server": {"http_port": "x"}, "service": [ADD]}, r"server: http_port: `int` is wanted"),
        ({"server": {"http_port": 70000}, "service": [ADD]}, r"http_port: 0 to 65535"),
        ({"server": {"tls_cert": "a.pem"}, "service": [ADD]}, r"tls_key: TLS needs both"),
        ({"server": {"fronts": 0}, "service": [ADD]}, r"fronts: 1 to 16"),
        ({"server": {"policy": "mps"}, "service": [ADD]}, r"policy 'mps': one of shared, priority"),
        ({"service": [ADD, ADD]}, r"two are named 'add'"),
        ({"service": [{"model": "bert"}]}, r"service 1: name is missing"),
        ({"service": [{"name": "a"}]}, r"service 'a': model: give either model or file"),
        ({"service": [{"name": "a", "model": "m:f", "file": "x.pt2"}]}, r"either model or file"),
        ({"service": [{"name": "a", "file": "x.pkl"}]}, r"file 'x.pkl': a torch.export .pt2"),
        ({"service": [{"name": "a b", "model": "bert"}]}, r"name 'a b': letters, digits"),
        (bad(bnd="5ms"), r"service 'digits': unknown key 'bnd'; did you mean bound\?"),
        (bad(bound="5"), r"bound: cannot read the bound '5'; write 5ms, or 1.1x"),
        (bad(bound="0ms"), r"bound: .* above 0"),
        (bad(bound="0.9x"), r"bound: .* cannot be kept: at least 1"),
        (bad(bound=5), r"bound: `str` is wanted, not `int`"),
        (bad(bound="99999999999999s"), r"bound: .* a day at most"),
        (bad(bound="99999999999999x"), r"bound: .* a day at most, or a million times"),
        (bad(wait="99999999999999s"), r"wait: a day at most"),
        (bad(model="numpy:module"), r"model 'numpy:module': write it as numpy:module:function"),
        (bad(bound="5ms", tier="background"), r"bound: background work has none"),
        (bad(tier="foreground"), r"tier 'foreground': one of service, background"),
        (bad(floor=0.5), r"floor: only background work has one"),
        (bad(floor=1.0, tier="background"), r"floor: a part of the rate"),
        (bad(batches=[4, 2]), r"batches: rising sizes"),
        (bad(batches=[0]), r"batches: rising sizes"),
        (bad(batches=8), r"batches: a list is wanted, not `int`"),
        (bad(batched=False, batches=[1, 2]), r"batches: a model without a batch dimension"),
        (bad(queue=0), r"queue: 1 to 1000000"),
        (bad(wait="5"), r"wait: cannot read the time '5'; write it like 2ms"),
        (bad(rate=-1), r"rate: requests a second"),
        (bad(instances=20), r"instances times batches add up to 60, and 32 is the most"),
        (bad(inputs=[]), r"inputs: a CPU function needs its inputs"),
        (bad(inputs=[{"name": "i", "datatype": "FP8", "shape": [1]}]), r"datatype 'FP8': one of"),
        (bad(inputs=[{"name": "i", "datatype": "FP32", "shape": [0]}]), r"shape of 'i'"),
        (bad(inputs=[{"name": "i", "datatype": "FP32", "shape": [10**9, 10**9]}]), r"shape of 'i'"),
        (bad(inputs=[{"name": "i", "datatype": "BYTES", "shape": [1], "room": 2**62}]), r"room"),
        (bad(inputs=[{"name": "i", "datatype": "FP32"}]), r"inputs\[0\]: shape is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line_with_its_key(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refusal:
        make_config(settings, "models.toml")
    assert str(refusal.value).startswith("models.toml: ")
    assert "\n" not in str(refusal.value)


def test_more_models_may_be_known_than_loaded() -> None:
    services = [
        {**ADD, "name": f"m{number}", "batches": [1], "load": number < 32} for number in range(100)
    ]
    config = make_config({"service": services}, "here")
    assert len(config.services) == 100 and check_workers(config.services[:32]) is None
    refusal = check_workers(config.services[:33])
    assert refusal is not None and "add up to 33, and 32 is the most that is loaded" in refusal


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[server", "is not TOML"),
        (b"\xff\xfe", "is not a text file"),
        (b"a = " + b"[" * 9999, "it is nested too deeply"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "models.toml"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=said):
        read_config(path)
    with pytest.raises(UsageError, match=r"cannot read .*other\.toml"):
        read_config(tmp_path / "other.toml")
    with pytest.raises(UsageError, match="cannot read 'nonsense!' in the mix"):
        read_config("nonsense!")


def test_a_service_that_is_no_table_is_named_by_its_place() -> None:
    with pytest.raises(UsageError, match="service 1: "):
        make_config({"service": [1]}, "the test")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_are_read(path: Path) -> None:
    assert read_config(path).services
