"""What a visit to a GPU measures, as data, in order of importance; and how much of it fits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.support.kept import add_rows, read_rows
from lab.support.pairs import PAIRS
from lab.support.workshop import Shelf

from eclip.contest.contest import usual_policies
from eclip.core.mix import Mix, parse_mix

DONE = "done.jsonl"
# What was seen on an H200, in seconds.
BEGIN_S = 30.0  # of a process: importing torch, compiling the loop
CAPTURE_S, PROFILE_S = 3.0, 8.0
PROCESSES_S = 20.0
SEARCH_S = 4.0
WARMUP_S = 0.12
RUN_S = 0.2  # of a run besides its window: warming up, and what is between two
FINALISTS_S = 30.0  # of a search that tries its best plans on the device
ALONE_S = 3.0  # rates alone, before every round
TRIAL_REQUESTS, LEAST_TRIAL_S, MOST_TRIAL_S = 300, 0.3, 3.0
MASKS, PROCESS_SETS = 9, 6  # settings that are tried


@dataclass(frozen=True)
class Part:
    """A comparison: what is done at once or not at all."""

    stage: str
    pair: str  # a name in PAIRS, or a mix of which all workers are background
    load: float = 0.0  # of what the services can serve alone, together
    bound: float = 1.5  # times the p99 alone
    contenders: tuple[str, ...] = ()  # none: all policies that can run
    requests: int = 1000  # of the rarest service, over all rounds
    rounds: int = 2
    least_s: float = 0.5  # of a run
    most_s: float = 5.5
    shape: str = "poisson"
    floor: float = 0.0
    verify: int = 0  # plans of a search that are tried on the device
    refine_s: float = 0.0

    @property
    def name(self) -> str:
        words = [f"{self.stage}: {self.pair}"]
        words += [f"at {self.load:g}"] * bool(self.load)
        words += [f"bound {self.bound:g}"] * bool(self.load and self.bound != 1.5)
        words += [self.shape] * (self.shape != "poisson")
        words += [f"floor {self.floor:g}"] * bool(self.floor)
        return " ".join(words)

    @property
    def slug(self) -> str:
        """In names of files; they may have to travel, so without odd characters."""
        return re.sub(r"[^\w.]+", "-", self.name)

    @property
    def models(self) -> tuple[str, ...]:
        if self.pair in PAIRS:
            return PAIRS[self.pair].models
        return tuple(str(model) for model in parse_mix(self.pair).models)

    @property
    def objectives(self) -> tuple[str, ...]:
        return ("slo",) if self.pair in PAIRS else ("throughput", "energy")

    def mix(self, shelf: Shelf) -> Mix:
        """With rates by what a request takes."""
        if self.pair not in PAIRS:
            return parse_mix(self.pair)
        *services, background = (shelf.model(name) for name in self.models)
        words = [
            f"{model}@{rate:.6f}rps/{self.bound:g}x"
            for model, rate in zip(services, self.rates(shelf), strict=True)
        ]
        return parse_mix(",".join([*words, f"{background}@background/floor={self.floor:g}"]))

    def rates(self, shelf: Shelf) -> list[float]:
        services = self.models[:-1] if self.pair in PAIRS else ()
        return [self.load * 1e3 / shelf.request_ms(name) / len(services) for name in services]

    def seconds(self, shelf: Shelf) -> float:
        """Of a run."""
        wanted = 1.05 * self.requests / self.rounds / min(self.rates(shelf), default=float("inf"))
        return round(min(max(wanted, self.least_s), self.most_s), 3)

    def trial_s(self, shelf: Shelf) -> float:
        """As a contest takes them."""
        slowest = min(self.rates(shelf), default=float("inf"))
        return min(max(TRIAL_REQUESTS / slowest, LEAST_TRIAL_S), MOST_TRIAL_S)

    def expected_s(self, shelf: Shelf, captured: Iterable[str]) -> float:
        """``captured``: models that are there already."""
        new = set(self.models) - set(captured)
        ready_s = sum(PROFILE_S if shelf.find(name) is None else CAPTURE_S for name in new)
        names = self.contenders or tuple(usual_policies(self.mix(shelf)))
        apart = any(name in ("mps", "timeslice") or name.startswith("MPS") for name in names)
        services = len(self.rates(shelf))
        if self.stage == LOOP:
            return ready_s + PROCESSES_S * apart + (len(names) + 2) * (self.most_s + RUN_S)
        trials = len(names) + MASKS * ("masks" in names) + PROCESS_SETS * ("mps" in names)
        searching = "search" in names
        return (
            max(ready_s, PROCESSES_S * apart)
            + trials * (self.trial_s(shelf) + RUN_S)
            + searching * len(self.objectives) * (SEARCH_S + self.refine_s)
            + searching * bool(self.verify) * FINALISTS_S
            + self.rounds * (services + len(names)) * (self.seconds(shelf) + RUN_S)
            + services * self.seconds(shelf)
            + self.rounds * ALONE_S
        )


# Services are fast and so are soon measured.
QUICK = ("bert+vgg", "alexnet+resnet152", "mobilenet+train-bert", "squeezenet+convnext")
OTHERS = (
    *("resnet+train-gpt", "vit+products12", "copies+copies", "bert+train-resnet", "resnet+bert"),
    *("bert8+densenet", "shufflenet+vit"),
)
FEW = ("yield", "search")
MIXES = (
    *(f"paper/{number}" for number in range(1, 8)),
    "bert:1,gpt2:1,resnet50:8,vit_b_16:1",
    "bert:32,resnet50:32,vgg19:32",
    "gpt2:8,vit_b_16:8",
    "resnet50:8,bert:8,densenet121:8,shufflenet:8",
    "mobilenet_v3:8,efficientnet:8,squeezenet:8,alexnet:8,resnet50:8,bert:8",
)
LOOP = "loop"  # a service whose next request comes as the last one ends
STAGES: dict[str, tuple[Part, ...]] = {  # the most important first
    "main": tuple(Part("main", pair, 0.35) for pair in (*QUICK[:2], *OTHERS[:3])),
    "bounds": tuple(
        Part("bounds", pair, load, bound, FEW)
        for bound in (1.1, 2.5)
        for load in (0.35, 0.6)
        for pair in QUICK
    ),
    LOOP: (
        Part(
            LOOP,
            "decode+prefill",
            contenders=(
                *("priority", "masks 25", "masks 50", "masks 75", "yield", "move"),
                *("MPS 25", "MPS 50", "MPS below"),
            ),
            most_s=2.0,
        ),
    ),
    "decode": tuple(Part("decode", "decode+prefill", load, 1.3, most_s=3.0) for load in (0.6, 0.9)),
    "three": (
        Part("three", "three+vgg", 0.5, contenders=("shared", "masks 50", *FEW), most_s=10.0),
    ),
    "shapes": tuple(
        Part("shapes", pair, 0.35, contenders=FEW, shape=shape)
        for pair, shape in (
            *((pair, "bursts") for pair in QUICK[:2]),
            *(("bert+vgg", shape) for shape in ("azure-code", "azure-conv")),
        )
    ),
    "more": tuple(Part("more", pair, 0.35) for pair in (*QUICK[2:], *OTHERS[3:])),
    "loads": tuple(
        Part("loads", pair, load, contenders=FEW) for pair in OTHERS for load in (0.2, 0.6)
    ),
    "claims": tuple(  # a p99 of 3,000 requests has a standard deviation of 5 to 12%
        Part("claims", pair, 0.35, contenders=FEW, requests=20_000, rounds=4, most_s=25.0)
        for pair in (*QUICK, *OTHERS)
    ),
    "mixes": tuple(Part("mixes", mix, rounds=3, verify=3, refine_s=10.0) for mix in MIXES),
}


def scaled(part: Part, scale: float) -> Part:
    """With so much of the requests and seconds: for a rehearsal."""
    if scale == 1:
        return part
    return replace(
        part,
        requests=max(20, round(scale * part.requests)),
        least_s=min(part.least_s, 0.1),
        most_s=max(0.1, scale * part.most_s),
        refine_s=scale * part.refine_s,
    )


def done_parts(folder: Path) -> dict[str, float]:
    """By name: the seconds that it took."""
    return {line["part"]: line["seconds"] for line in read_rows(folder / DONE)}


def note_done(folder: Path, part: Part, seconds: float) -> None:
    add_rows(folder / DONE, [{"part": part.name, "seconds": round(seconds, 1)}])


def expected(parts: Sequence[Part], shelf: Shelf, captured: Iterable[str] = ()) -> dict[str, float]:
    """Seconds of every part that is left, by its name, in this order, in one process."""
    captured = set(captured)
    found = {}
    done = done_parts(shelf.folder)
    for part in parts:
        if part.name not in done:
            found[part.name] = part.expected_s(shelf, captured)
            captured |= set(part.models)
    return found


def fitting(parts: Sequence[Part], expected_s: Mapping[str, float], left_s: float) -> Part | None:
    """The next part that is left and fits into the time; None: there is none."""
    for part in parts:
        if expected_s.get(part.name, float("inf")) <= left_s:
            return part
    return None
