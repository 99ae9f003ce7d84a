"""Mix: the workers that run together, and the text that names them.

``2xalbert:8,densenet201:8@120rps`` is two workers serving albert in batches of 8, back to back,
and one serving densenet201 at 120 requests a second. A model of one's own is named by its factory,
``package.module:factory:8``. ``albert~66:8`` is albert with the kernels that libraries choose when
they are told that the device has 66 units. ``paper/1`` … ``paper/7`` are the mixes of the ECLIP
paper's Table I.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from eclip.errors import UsageError, unknown_name

MAX_WORKERS = 32
MAX_BATCH = 65536
MAX_RATE_RPS = 1e9
DEFAULT_BATCH = 8

# The paper prints its ResNet as "resnet15"; of the family only resnet152 has the number of kernels
# that its Table I implies (613 - 34 for alexnet - about 60 for vgg19).
PAPER_MIXES = {
    "paper/1": "2xalbert:8,densenet201:8",
    "paper/2": "albert:8,densenet201:8",
    "paper/3": "albert:8,densenet201:8,vgg19:8",
    "paper/4": "alexnet:8,resnet152:8,vgg19:8",
    "paper/5": "resnext101:8,shufflenet:8",
    "paper/6": "2xdensenet201:8",
    "paper/7": "3xalexnet:8",
}

_Part = tuple[str, int, float | None]  # model, batch, rate

_PART = re.compile(
    r"(?:(?P<repeat>\d{1,30})x)?(?P<model>[A-Za-z][\w.-]*(?::[A-Za-z_]\w*)?(?:~\w*)?)"
    r"(?::(?P<batch>\d{1,30}))?"
    r"(?:@(?P<rate>\d{1,30}(?:\.\d{1,30})?)rps)?",
    re.ASCII,
)
_UNITS = re.compile(r"[1-9]\d{0,5}", re.ASCII)


class MixWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: str
    batch: int
    rate_rps: float | None = None  # None: closed loop, back to back

    def __post_init__(self) -> None:
        if self.batch < 1 or not (self.rate_rps is None or 0 < self.rate_rps < float("inf")):
            raise ValueError(f"worker {self.name!r}: batch and rate start above 0")
        try:
            split_model(self.model)
        except UsageError as error:
            raise ValueError(f"worker {self.name!r}: {error}") from None

    @property
    def key(self) -> str:
        return f"{self.model}:{self.batch}"

    @property
    def service(self) -> str:
        """What it serves, whatever kernels it does that with."""
        return service_of(self.model, self.batch)


class Mix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # as the user wrote it
    workers: tuple[MixWorker, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.workers) <= MAX_WORKERS:
            raise ValueError(f"a mix has 1 to {MAX_WORKERS} workers, not {len(self.workers)}")
        names = [worker.name for worker in self.workers]
        if len(set(names)) != len(names):
            raise ValueError("two workers have one name")

    @property
    def models(self) -> tuple[str, ...]:
        """``model:batch`` of every worker."""
        return tuple(worker.key for worker in self.workers)

    def as_asked(self) -> Mix:
        """As its name says: of a plan, a search may have chosen other kernels for its workers."""
        try:
            asked = parse_mix(self.name)
        except UsageError:  # it was not made from a text
            return self
        services = [[worker.service for worker in mix.workers] for mix in (self, asked)]
        return asked if services[0] == services[1] else self


def split_model(model: str) -> tuple[str, int]:
    """``albert~66`` to what it serves and the units that its kernels are chosen for; 0: all."""
    served, tilde, units = model.partition("~")
    if tilde and not (served and _UNITS.fullmatch(units)):
        raise UsageError(
            f"{model!r} is no model: before ~ stands its name, and behind it the units that "
            f"kernels are chosen for, from 1, as in albert~66"
        )
    return served, int(units or 0)


def service_of(model: str, batch: int) -> str:
    """``albert:8`` of ``albert~66`` and 8, too."""
    return f"{split_model(model)[0]}:{batch}"


def with_kernels_for(model: str, units: int) -> str:
    """The same model with its kernels chosen for so many units; 0: for all."""
    served, _ = split_model(model)
    return f"{served}~{units}" if units else served


def parse_mix(text: str) -> Mix:
    name = text.strip()
    if name.startswith("paper/") and name not in PAPER_MIXES:
        raise unknown_name("mix", name, PAPER_MIXES)
    parts: list[_Part] = []
    for part in PAPER_MIXES.get(name, name).split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise UsageError(
                f"cannot read {part!r} in the mix {text!r}; write it like "
                f"2xalbert:8,densenet201:8@120rps (repeat, model, batch, rate) or paper/1 … paper/7"
            )
        repeat = int(match["repeat"] or 1)
        batch = int(match["batch"] or DEFAULT_BATCH)
        rate = float(match["rate"]) if match["rate"] else None
        split_model(match["model"])
        if repeat < 1 or batch < 1 or rate == 0:
            raise UsageError(f"{part!r} in the mix {text!r}: repeat, batch and rate start above 0")
        if batch > MAX_BATCH:
            raise UsageError(f"{part!r} in the mix {text!r}: the largest batch is {MAX_BATCH}")
        if rate is not None and rate > MAX_RATE_RPS:
            raise UsageError(
                f"{part!r} in the mix {text!r}: the largest rate is {MAX_RATE_RPS:.0f} requests/s"
            )
        if len(parts) + repeat > MAX_WORKERS:
            raise UsageError(f"the mix {text!r} has more than {MAX_WORKERS} workers; ask for fewer")
        parts += [(match["model"], batch, rate)] * repeat
    names = _names(parts)
    if len(set(names)) != len(names):
        raise UsageError(f"two workers of the mix {text!r} would have one name; name models apart")
    return _mix(name, parts)


def mix_of(models: Iterable[tuple[str, int]]) -> Mix:
    """The closed-loop mix of these models and batch sizes."""
    parts: list[_Part] = [(model, batch, None) for model, batch in models]
    return _mix(",".join(f"{model}:{batch}" for model, batch, _ in parts), parts)


def _mix(name: str, parts: list[_Part]) -> Mix:
    return Mix(
        name=name,
        workers=tuple(
            MixWorker(name=worker_name, model=model, batch=batch, rate_rps=rate)
            for worker_name, (model, batch, rate) in zip(_names(parts), parts, strict=True)
        ),
    )


def _names(parts: list[_Part]) -> list[str]:
    """``albert`` where it is the only one, otherwise ``albert.1``, ``albert.2``, …"""
    models = [split_model(model)[0] for model, _, _ in parts]
    return [
        model if models.count(model) == 1 else f"{model}.{models[: index + 1].count(model)}"
        for index, model in enumerate(models)
    ]
