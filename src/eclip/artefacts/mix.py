"""Mix: the workers that run together, and the text that names them.

``2xalbert:8,densenet201:8@120rps`` is two workers serving albert in batches of 8, back to back,
and one serving densenet201 at 120 requests a second; how a model is written is in model_key.py.
``paper/1`` … ``paper/7`` are the mixes of the ECLIP paper's Table I.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from eclip.artefacts.model_key import ModelKey, parse_model
from eclip.errors import UsageError, unknown_name

MAX_WORKERS = 32
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

_Part = tuple[ModelKey, float | None]  # model, rate

_PART = re.compile(
    r"(?:(?P<repeat>\d{1,30})x)?(?P<model>[A-Za-z][\w.-]*(?::[A-Za-z_]\w*)?(?:~\w*)?)"
    r"(?::(?P<batch>\d{1,30}))?"
    r"(?:@(?P<rate>\d{1,30}(?:\.\d{1,30})?)rps)?",
    re.ASCII,
)


class MixWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: ModelKey
    rate_rps: float | None = None  # None: closed loop, back to back

    def __post_init__(self) -> None:
        if not (self.rate_rps is None or 0 < self.rate_rps < float("inf")):
            raise ValueError(f"worker {self.name!r}: a rate is a finite number above 0")


class Mix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that run together, each with its model and its rate; closed loop has none."""

    name: str  # as the user wrote it
    workers: tuple[MixWorker, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.workers) <= MAX_WORKERS:
            raise ValueError(f"a mix has 1 to {MAX_WORKERS} workers, not {len(self.workers)}")
        names = [worker.name for worker in self.workers]
        if len(set(names)) != len(names):
            raise ValueError("two workers have one name")

    @property
    def models(self) -> tuple[ModelKey, ...]:
        return tuple(worker.model for worker in self.workers)

    @property
    def has_rates(self) -> bool:
        """Some worker's requests arrive by themselves."""
        return any(worker.rate_rps is not None for worker in self.workers)

    def as_asked(self) -> Mix:
        """As its name says: of a plan, a search may have chosen kernels for fewer units."""
        try:
            asked = parse_mix(self.name)
        except UsageError:  # it was not made from a text
            return self
        mine, theirs = ([model.usual for model in mix.models] for mix in (self, asked))
        return asked if mine == theirs else self


def parse_mix(text: str) -> Mix:
    """The mix that a text names.

    It has parts with commas between: repeat, model, batch, rate; or it is one of the paper's::

        mix = eclip.parse_mix("2xalbert:8,densenet201:8@120rps")
        print([worker.name for worker in mix.workers])
    """
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
        rate = float(match["rate"]) if match["rate"] else None
        if repeat < 1 or rate == 0:
            raise UsageError(f"{part!r} in the mix {text!r}: repeat and rate start above 0")
        if rate is not None and rate > MAX_RATE_RPS:
            raise UsageError(
                f"{part!r} in the mix {text!r}: the largest rate is {MAX_RATE_RPS:.0f} requests/s"
            )
        model = parse_model(f"{match['model']}:{match['batch'] or DEFAULT_BATCH}")
        if len(parts) + repeat > MAX_WORKERS:
            raise UsageError(f"the mix {text!r} has more than {MAX_WORKERS} workers; ask for fewer")
        parts += [(model, rate)] * repeat
    names = _names(parts)
    if len(set(names)) != len(names):
        raise UsageError(f"two workers of the mix {text!r} would have one name; name models apart")
    return _mix(name, parts)


def mix_of(models: Iterable[ModelKey]) -> Mix:
    """The closed-loop mix of these models."""
    parts: list[_Part] = [(model, None) for model in models]
    return _mix(",".join(str(model) for model, _ in parts), parts)


def _mix(name: str, parts: list[_Part]) -> Mix:
    return Mix(
        name=name,
        workers=tuple(
            MixWorker(name=worker_name, model=model, rate_rps=rate)
            for worker_name, (model, rate) in zip(_names(parts), parts, strict=True)
        ),
    )


def _names(parts: list[_Part]) -> list[str]:
    """``albert`` where it is the only one, otherwise ``albert.1``, ``albert.2``, …"""
    models = [model.name for model, _ in parts]
    return [
        model if models.count(model) == 1 else f"{model}.{models[: index + 1].count(model)}"
        for index, model in enumerate(models)
    ]
