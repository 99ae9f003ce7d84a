"""Configuration: what a server serves, from one TOML file or from a mix.

``[server]`` says where to listen and on which device to run, every ``[[service]]`` names a model
and its promise. A wrong value is refused with one line that names the key and what to
write instead.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import ssl
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from eclip.core.mix import MAX_WORKERS, Bound, Mix, parse_mix, read_bound, read_ms
from eclip.errors import UsageError, unknown_name
from eclip.server.tensors import DATATYPES

FUNCTION = "numpy:"  # before module:function, a model that a CPU computes
_FUNCTION = re.compile(r"numpy:[\w.]+:\w+")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_TIERS = ("service", "background")
YIELD = "yield"
_POLICIES = ("shared", "priority", YIELD)
_MOST_DIMENSIONS = 6
MOST_BATCH = 1024
_MOST_BYTES = 1 << 40  # of a tensor's row; no host has room for more
_MOST_MS = 86_400_000.0  # a day


class TensorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input or output. A dimension of -1 is free; the batch is left out of the shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    room: int | None = None  # bytes of one row, needed where the shape or BYTES leave it open

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: a tensor needs one")
        if self.datatype not in DATATYPES:
            raise ValueError(f"datatype {self.datatype!r}: one of {', '.join(DATATYPES)}")
        if len(self.shape) > _MOST_DIMENSIONS or any(size < -1 or size == 0 for size in self.shape):
            raise ValueError(
                f"shape of {self.name!r}: up to {_MOST_DIMENSIONS} sizes above 0, or -1 for a free "
                f"one; the batch is left out"
            )
        if math.prod(self.shape) * DATATYPES[self.datatype].dtype.itemsize > _MOST_BYTES:
            raise ValueError(f"shape of {self.name!r}: a row has at most {_MOST_BYTES} bytes")
        if self.room is not None and not 1 <= self.room <= _MOST_BYTES:
            raise ValueError(f"room of {self.name!r}: 1 to {_MOST_BYTES} bytes")


class ServiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[service]]``."""

    name: str
    model: str | None = None  # of the zoo, module:factory, or numpy:module:function
    file: str | None = (
        None  # torch.export (.pt2) or TorchScript (.ts): may hold code, so named here
    )
    inputs: tuple[TensorSettings, ...] = ()
    outputs: tuple[TensorSettings, ...] = ()
    batched: bool = True  # requests have a batch dimension, and are joined along it
    batches: tuple[int, ...] = ()  # none: 1, 2, 4, … as memory allows
    bound: str | None = None
    tier: str = "service"
    weight: float = 1.0
    floor: float = 0.0
    queue: int = 256  # requests that wait, at most
    wait: str = "0ms"  # for a fuller batch while the device is free, at most
    instances: int | None = None  # none: as many as its rate asks for
    rate: float | None = None  # requests a second that are expected
    profile: str | None = None  # the model whose times a CPU function takes on the simulator
    load: bool = True  # at the start

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name {self.name!r}: letters, digits and . _ - only")
        if (self.model is None) == (self.file is None):
            raise ValueError("model: give either model or file")
        if self.file is not None and not self.file.endswith((".pt2", ".ts")):
            raise ValueError(f"file {self.file!r}: a torch.export .pt2 or a TorchScript .ts")
        if self.computes_on_cpu and not _FUNCTION.fullmatch(str(self.model)):
            raise ValueError(f"model {self.model!r}: write it as numpy:module:function")
        if self.computes_on_cpu and not (self.inputs and self.outputs):
            raise ValueError("inputs: a CPU function needs its inputs and outputs written down")
        for tensors in (self.inputs, self.outputs):
            names = [tensor.name for tensor in tensors]
            if len(set(names)) != len(names):
                raise ValueError("inputs: two tensors have one name")
        if list(self.batches) != sorted(set(self.batches)) or any(
            not 1 <= batch <= MOST_BATCH for batch in self.batches
        ):
            raise ValueError(f"batches: rising sizes of 1 to {MOST_BATCH}, like [1, 4, 8]")
        if not self.batched and self.batches not in ((), (1,)):
            raise ValueError("batches: a model without a batch dimension has none; leave it out")
        if self.bound is not None:
            if self.tier == "background":
                raise ValueError("bound: background work has none; give it a floor")
            try:
                read_bound(self.bound)
            except ValueError as error:
                raise ValueError(f"bound: {error}") from None
        if self.tier not in _TIERS:
            raise ValueError(f"tier {self.tier!r}: one of {', '.join(_TIERS)}")
        if not 0 < self.weight < float("inf"):
            raise ValueError("weight: a number above 0")
        if not 0 <= self.floor < 1:
            raise ValueError("floor: a part of the rate alone, 0 to below 1")
        if self.floor and self.tier != "background":
            raise ValueError('floor: only background work has one; add tier = "background"')
        if not 1 <= self.queue <= 1_000_000:
            raise ValueError("queue: 1 to 1000000 requests")
        if not 1 <= self.replicas <= MAX_WORKERS:
            raise ValueError(f"instances: 1 to {MAX_WORKERS}")
        if self.rate is not None and not 0 < self.rate < 1e9:
            raise ValueError("rate: requests a second, above 0 and below 1e9")
        try:
            wait_ms = read_ms(self.wait)
        except ValueError as error:
            raise ValueError(f"wait: {error}") from None
        if wait_ms > _MOST_MS:
            raise ValueError("wait: a day at most")

    @property
    def computes_on_cpu(self) -> bool:
        return self.model is not None and self.model.startswith(FUNCTION)

    @property
    def replicas(self) -> int:
        return 1 if self.instances is None else self.instances

    @property
    def promised(self) -> Bound | None:
        return None if self.bound is None else read_bound(self.bound)

    @property
    def wait_ns(self) -> int:
        return _nanoseconds(self.wait)


@functools.cache  # every request asks
def _nanoseconds(text: str) -> int:
    return round(1e6 * read_ms(text))


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[server]``"""

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001  # 0, as for HTTP: a free one
    fronts: int = 1
    device: str = "sim"
    topology: str = "h200"  # that a simulator simulates
    profiles: tuple[str, ...] = ()  # folders of profiles, used before the package's own
    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()  # names by which clients without a token may change what is served
    max_body_mb: float = 64.0
    grace_seconds: float = 5.0  # after SIGTERM: not ready, but serving
    strict_readiness: bool = False  # not ready while a model that should be loaded is not
    watch: bool = False  # read the file, the token and the certificate again when they change
    # How services share the device; none: they give way to each other as a search finds best.
    policy: str | None = None
    # Answer as soon as the smallest batch of each service is ready, and open the others then; none:
    # where opening takes long, on a GPU.
    staged: bool | None = None
    replan: bool = True  # when measured rates drift
    replan_seconds: float = 5.0  # of a search

    def __post_init__(self) -> None:
        for name in ("http_port", "grpc_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ValueError(f"{name}: 0 to 65535")
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError("grpc_port: another than http_port")
        if not 1 <= self.fronts <= 16:
            raise ValueError("fronts: 1 to 16 processes")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_key: TLS needs both tls_cert and tls_key")
        if not 0 < self.max_body_mb <= 4096:
            raise ValueError("max_body_mb: above 0, at most 4096")
        if not 0 <= self.grace_seconds <= 3600:
            raise ValueError("grace_seconds: 0 to 3600")
        if self.policy not in (None, *_POLICIES):
            raise ValueError(f"policy {self.policy!r}: one of {', '.join(_POLICIES)}, or none")
        if not 0 < self.replan_seconds <= 600:
            raise ValueError("replan_seconds: above 0, at most 600")


class ServingConfig(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"services": "service"},
):
    """All that a server is told."""

    server: ServerSettings = ServerSettings()
    services: tuple[ServiceSettings, ...] = ()

    def __post_init__(self) -> None:
        if not self.services:
            raise ValueError("service: at least one [[service]] is needed")
        names = [service.name for service in self.services]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise ValueError(f"service: two are named {double!r}; name them apart")
        too_many = check_workers([service for service in self.services if service.load])
        if too_many is not None:
            raise ValueError(too_many)


def check_workers(services: Iterable[ServiceSettings]) -> str | None:
    """Why a device cannot run all of these services at a time."""
    workers = sum(service.replicas * len(service.batches or (1,)) for service in services)
    if workers <= MAX_WORKERS:
        return None
    return (
        f"batches: instances times batches add up to {workers}, and {MAX_WORKERS} is the most "
        f"that is loaded at a time; use fewer, or give some services load = false"
    )


def read_config(source: str | Path) -> ServingConfig:
    """The configuration in a TOML file; or of a mix, such as ``paper/3``."""
    path = Path(source)
    if path.suffix == ".toml" or path.is_file():
        return _read_file(path)
    return config_of_mix(parse_mix(str(source)))


def read_token(file: str) -> str:
    try:
        token = Path(file).read_text("utf-8").strip()
    except OSError as error:
        raise UsageError(f"token_file: cannot read {file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"token_file: {file} is not a text file") from None
    if not token:
        raise UsageError(f"token_file: {file} is empty; write the token into it")
    return token


def check_files(server: ServerSettings) -> str:
    """Refuse files that cannot be read, before anything starts. The digest of token and
    certificate."""
    digest = hashlib.sha256()
    if server.token_file is not None:
        digest.update(read_token(server.token_file).encode())
    for key in ("tls_cert", "tls_key"):
        file = getattr(server, key)
        try:
            if file is not None:
                digest.update(Path(file).read_bytes())
        except OSError as error:
            raise UsageError(f"{key}: cannot read {file}: {error.strerror or error}") from None
    if server.tls_cert is not None:
        try:
            # No password: a server cannot ask for one, so its key is not encrypted.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                server.tls_cert, server.tls_key, password=""
            )
        except ssl.SSLError as error:
            raise UsageError(
                f"tls_cert, tls_key: {server.tls_cert} and {server.tls_key} are no certificate and "
                f"its unencrypted key in PEM ({error.reason or error})"
            ) from None
    return digest.hexdigest()


def with_settings(config: ServingConfig, given: Mapping[str, Any]) -> ServingConfig:
    """The configuration with these settings of the server instead, where they are not None."""
    changed = {name: value for name, value in given.items() if value is not None}
    for name, value in changed.items():
        if isinstance(value, str) and not value.isprintable():  # such as bytes that are no UTF-8
            raise UsageError(f"{name} {value!r} is not readable text; give another one")
    try:
        server = msgspec.structs.replace(config.server, **changed)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return msgspec.structs.replace(config, server=server)


def config_of_mix(mix: Mix) -> ServingConfig:
    """A service for every worker of the mix, with its batch as the only one."""
    services = tuple(
        ServiceSettings(
            name=worker.name.replace(":", "."),
            model=worker.model.title,
            batches=(worker.model.batch,),
            bound=None if worker.bound is None else str(worker.bound),
            tier="service" if worker.background is None else "background",
            weight=1.0 if worker.background is None else worker.background.weight,
            floor=0.0 if worker.background is None else worker.background.floor,
            rate=worker.rate_rps,
        )
        for worker in mix.workers
    )
    return ServingConfig(services=services)


def make_config(settings: Mapping[str, Any], where: str) -> ServingConfig:
    """A configuration from tables as TOML has them; ``where`` begins what a refusal says."""
    try:
        return msgspec.convert(dict(settings), ServingConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {in_words(str(error), settings)}") from None


def _read_file(path: Path) -> ServingConfig:
    try:
        settings = tomllib.loads(path.read_text("utf-8-sig"))  # some editors begin so
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file; write it as TOML in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: it is nested too deeply") from None
    return make_config(settings, str(path))


_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "": ServingConfig, "server": ServerSettings, "service": ServiceSettings,
    "inputs": TensorSettings, "outputs": TensorSettings,
}  # fmt: skip


def in_words(
    message: str,
    settings: Mapping[str, Any],
    structs: Mapping[str, type[msgspec.Struct]] = _STRUCTS,
) -> str:
    """What msgspec says, with the service's name instead of its place, and the keys there are."""
    said, _, path = message.partition(" - at `$")
    parts = re.findall(r"\.(\w+)(?:\[(\d+|\.\.\.)\])?", path)
    where = []
    for key, index in parts:
        if key == "service" and index.isdigit():
            entry = settings["service"][int(index)]
            named = entry.get("name") if isinstance(entry, Mapping) else None
            where.append(f"service {named or int(index) + 1!r}")
        else:
            where.append(f"{key}[{index}]" if index else key)
    unknown = re.search(r"unknown field `(.*)`", said)
    if unknown is not None:
        struct = structs[parts[-1][0] if parts else ""]
        said = str(
            unknown_name(
                "key", unknown[1], [one.encode_name for one in msgspec.structs.fields(struct)]
            )
        )
    missing = re.search(r"missing required field `(.*)`", said)
    if missing is not None:
        said = f"{missing[1]} is missing; write it"
    said = said.replace("Expected `array`, got", "a list is wanted, not")
    said = re.sub(r"Expected `(.*?)(?: \| null)?`, got `(.*?)`", r"`\1` is wanted, not `\2`", said)
    return ": ".join([*where, said])
