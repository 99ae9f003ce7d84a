"""Mix: the workers that run together, and the text that names them.

``2xalbert:8,densenet201:8@120rps`` is two workers serving albert in batches of 8, back to back,
and one serving densenet201 at 120 requests a second; model_key.py reads the models' names.
``bert:1@300rps/5ms`` is a service with a bound of 5 ms on its p99, ``bert:1@300rps/1.1x`` a service
with a bound of 1.1 times its p99 alone. ``vgg19:32@background/floor=0.2/weight=2`` is background.
``paper/1`` … ``paper/7`` are the mixes of the ECLIP paper's Table I.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from eclip.core.model_key import ModelKey, parse_model
from eclip.errors import UsageError, unknown_name

MAX_WORKERS = 32
MAX_RATE_RPS = 1e9
DEFAULT_BATCH = 8
LONGEST_BOUND_MS = 24 * 3600 * 1000.0  # ten times this, in ns, must fit into a word of a board
_MOST_TIMES_ALONE = 1e6

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

_NUMBER = r"\d{1,30}(?:\.\d{1,30})?"
_PART = re.compile(
    r"(?:(?P<repeat>\d{1,30})x)?(?P<model>[A-Za-z][\w.-]*(?::[A-Za-z_]\w*)?(?:~\w*)?)"
    r"(?::(?P<batch>\d{1,30}))?"
    rf"(?:@(?:(?P<rate>{_NUMBER})rps|(?P<background>background)))?"
    r"(?P<terms>(?:/[^/]*)*)",
    re.ASCII,
)
_BOUND = re.compile(rf"(?P<number>{_NUMBER})(?P<unit>us|ms|s|x)", re.ASCII)
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_TERM = re.compile(rf"(?P<name>floor|weight)=(?P<number>{_NUMBER})", re.ASCII)


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A service's largest allowed p99: in ms, or as a multiple of its p99 alone."""

    ms: float | None = None
    times_alone: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.ms, self.times_alone) if value is not None]
        if len(given) != 1 or not 0 < given[0] < float("inf"):
            raise ValueError("a bound is above 0, in ms or as a multiple of the p99 alone")
        if (self.ms or 0) > LONGEST_BOUND_MS or (self.times_alone or 0) > _MOST_TIMES_ALONE:
            raise ValueError("a bound is a day at most, or a million times the p99 alone")
        if self.times_alone is not None and self.times_alone < 1:
            raise ValueError(
                f"a bound of {self.times_alone:g} times the p99 alone cannot be kept: at least 1"
            )

    def __str__(self) -> str:
        return f"{self.times_alone:g}x" if self.ms is None else f"{self.ms:g}ms"


class Background(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work without a bound. It gives way to services but keeps its floor."""

    weight: float = 1.0  # of its ratio in the mean over all background
    floor: float = 0.0  # the least part of its rate alone

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"a weight is a finite number above 0, not {self.weight:g}")
        if not 0 <= self.floor < 1:
            raise ValueError(
                f"a floor is a part of the rate alone, 0 to below 1, not {self.floor:g}"
            )


class MixWorker(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    name: str
    model: ModelKey
    rate_rps: float | None = None  # None: closed loop, back to back
    bound: Bound | None = None  # of a service
    background: Background | None = None

    def __post_init__(self) -> None:
        if not (self.rate_rps is None or 0 < self.rate_rps < float("inf")):
            raise ValueError(f"worker {self.name!r}: a rate is a finite number above 0")
        if self.bound is not None and self.background is not None:
            raise ValueError(f"worker {self.name!r}: background work has no bound; give it a floor")
        if self.bound is not None and self.rate_rps is None:
            raise ValueError(
                f"worker {self.name!r}: a service with a bound needs the rate at which its "
                f"requests arrive, as in {self.model}@100rps/{self.bound}"
            )


class Mix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workers that run together, each with its model and its tier."""

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
    def services(self) -> tuple[int, ...]:
        """The workers with a bound; the others give way to them."""
        return tuple(i for i, worker in enumerate(self.workers) if worker.bound is not None)

    @property
    def floors(self) -> tuple[float, ...]:
        """The floor of every worker; 0: none."""
        return tuple(one.background.floor if one.background else 0.0 for one in self.workers)

    def is_background(self, index: int) -> bool:
        """True for a worker marked as background, and beside services for a worker without a bound
        and a rate."""
        worker = self.workers[index]
        unasked = worker.bound is None and worker.rate_rps is None
        return worker.background is not None or (unasked and bool(self.services))

    @property
    def has_rates(self) -> bool:
        """True if some worker has a rate."""
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

    It has parts with commas between: repeat, model, batch, rate, bound; or it is one of the
    paper's::

        mix = eclip.parse_mix("2xalbert:8,densenet201:8@120rps")
        print([worker.name for worker in mix.workers])
    """
    name = text.strip()
    if name.startswith("paper/") and name not in PAPER_MIXES:
        raise unknown_name("mix", name, PAPER_MIXES)
    workers: list[MixWorker] = []
    for part in PAPER_MIXES.get(name, name).split(","):
        match = _PART.fullmatch(part.strip())
        terms = match["terms"].split("/")[1:] if match else []
        tier = match and (match["rate"] or match["background"])
        # A bound without a rate is read, to say what is missing.
        if match is None or (terms and not tier and not _BOUND.fullmatch(terms[0])):
            raise UsageError(
                f"cannot read {part!r} in the mix {text!r}; write it like "
                f"2xalbert:8,densenet201:8@120rps (repeat, model, batch, rate), "
                f"bert:1@300rps/5ms (a service), vgg19:32@background, or paper/1 … paper/7"
            )
        where = f"{part!r} in the mix {text!r}"
        repeat = int(match["repeat"] or 1)
        rate = float(match["rate"]) if match["rate"] else None
        if repeat < 1 or rate == 0:
            raise UsageError(f"{where}: repeat and rate start above 0")
        if rate is not None and rate > MAX_RATE_RPS:
            raise UsageError(f"{where}: the largest rate is {MAX_RATE_RPS:.0f} requests/s")
        model = parse_model(f"{match['model']}:{match['batch'] or DEFAULT_BATCH}")
        if len(workers) + repeat > MAX_WORKERS:
            raise UsageError(f"the mix {text!r} has more than {MAX_WORKERS} workers; ask for fewer")
        try:
            background = _read_background(terms) if match["background"] else None
            bound = None if match["background"] else _read_bound(terms)
            worker = MixWorker(
                name=model.name, model=model, rate_rps=rate, bound=bound, background=background
            )
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from None
        workers += [worker] * repeat
    named = _named(workers)
    if len({worker.name for worker in named}) != len(named):
        raise UsageError(f"two workers of the mix {text!r} would have one name; name models apart")
    return Mix(name=name, workers=named)


def _read_bound(terms: list[str]) -> Bound | None:
    return read_bound("/".join(terms)) if terms else None


def read_bound(text: str) -> Bound:
    """The bound written as ``5ms``, ``250us``, ``1.5s``, or ``1.1x`` (1.1 times the p99 alone)."""
    match = _BOUND.fullmatch(text)
    if match is None:
        raise ValueError(
            f"cannot read the bound {text!r}; write 5ms, or 1.1x for 1.1 times the p99 alone"
        )
    if match["unit"] == "x":
        return Bound(times_alone=float(match["number"]))
    return Bound(ms=read_ms(text))


def read_ms(text: str) -> float:
    """A time such as ``5ms``, ``250us`` or ``1.5s``."""
    match = _BOUND.fullmatch(text)
    if match is None or match["unit"] == "x":
        raise ValueError(f"cannot read the time {text!r}; write it like 2ms")
    return float(match["number"]) * _MS[match["unit"]]


def _read_background(terms: list[str]) -> Background:
    given: dict[str, float] = {}
    for term in terms:
        match = _TERM.fullmatch(term)
        if match is None or match["name"] in given:
            raise ValueError(
                f"cannot read {term!r}; write background/floor=0.2/weight=2, each once at most"
            )
        given[match["name"]] = float(match["number"])
    return Background(**given)


def mix_of(models: Iterable[ModelKey]) -> Mix:
    """The closed-loop mix of these models."""
    workers = [MixWorker(name=model.name, model=model) for model in models]
    return Mix(name=",".join(str(worker.model) for worker in workers), workers=_named(workers))


def with_tiers(mix: Mix, tiers: Mapping[str, str]) -> Mix:
    """The mix with tiers by workers' names, written as after the @ of a mix: ``300rps/5ms``,
    ``background/floor=0.2``."""
    workers = {worker.name: worker for worker in mix.workers}
    texts = {worker.name: str(worker.model) for worker in mix.workers}
    for name, tier in tiers.items():
        if name not in workers:
            raise unknown_name("model", name, workers)
        (asked, *others) = parse_mix(f"model:1@{tier}").workers
        if others:
            raise UsageError(f"{name}: give a single tier, such as 300rps/5ms, not {tier!r}")
        workers[name] = msgspec.structs.replace(
            workers[name],
            rate_rps=asked.rate_rps,
            bound=asked.bound,
            background=asked.background,
        )
        texts[name] += f"@{tier}"
    return Mix(name=",".join(texts.values()), workers=tuple(workers.values()))


def _named(workers: list[MixWorker]) -> tuple[MixWorker, ...]:
    """The workers with distinct names: ``albert`` if used once, else ``albert.1``, ``albert.2``"""
    models = [worker.model.name for worker in workers]
    return tuple(
        worker
        if models.count(worker.name) == 1
        else msgspec.structs.replace(
            worker, name=f"{worker.name}.{models[: index + 1].count(worker.name)}"
        )
        for index, worker in enumerate(workers)
    )
