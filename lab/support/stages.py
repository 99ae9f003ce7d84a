"""What a visit to a GPU measures, in order of importance, and how much of it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.support import deaths, together
from lab.support.contenders import BASELINES, OURS_APART, SWEPT_APART
from lab.support.effort import Effort, Task
from lab.support.kept import add_rows, read_rows

BOUNDS = ("bound 1.1", "bound 1.5", "bound 1.5 careful", "bound 2.5", "bound 2.5 careful")
FULL = (*BASELINES, "yield d1", "yield d2", "yield fine", *BOUNDS, *SWEPT_APART)
# At further loads: without what no user would take.
LATER = (
    *(way for way in BASELINES if way not in ("streams", "segments")),
    *("yield d2", *SWEPT_APART),
)
FEW = ("priorities", "yield d2")
# Baselines are swept at all loads on four pairs, whose services are fast and so are soon measured.
AT_ALL_LOADS = ("bert+vgg", "alexnet+resnet152", "mobilenet+train-bert", "squeezenet+convnext")
AT_ONE_LOAD = (
    *("resnet+train-gpt", "vit+products12", "copies+copies", "bert+train-resnet", "resnet+bert"),
    *("bert8+densenet", "shufflenet+vit"),
)
IN_PROCESSES = ("bert+vgg", "alexnet+resnet152", "resnet+train-gpt")
ALWAYS_BUSY = 1.0  # the load of a service whose next request comes as the last one ends
DONE = "done.jsonl"


@dataclass(frozen=True)
class Part:
    """What is done at once or not at all: a task, a mix of background, or what has no choices."""

    stage: str
    task: Task | None = None
    mix: str = ""

    @property
    def name(self) -> str:
        what = self.task.name if self.task is not None else self.mix
        return f"{self.stage}: {what}" if what else self.stage


def stages() -> dict[str, list[Part]]:
    """By name, the most important first."""
    # A p99 takes 1,000 requests of the rarest service, however long that is.
    quick = Effort(most_s=5.5)
    long = Effort(requests=4000, rounds=4, most_s=6.0)
    calm = ("priorities", "yield d2", "bound 1.5")
    return {
        "main": _tasks("main", [_full(pair) for pair in (*AT_ALL_LOADS[:2], *AT_ONE_LOAD[:3])]),
        "deaths": [Part("deaths")],
        "together": [Part("together", mix=mix) for mix in together.MIXES],
        "decode": _tasks(
            "decode",
            [
                Task(
                    "decode+prefill",
                    (0.6, 0.9),
                    (
                        *("priorities", "launches 4/2", "masks 25", "masks 50", "masks 75"),
                        *("yield d2", "move half", "bound 1.3", "MPS 50", "MPS priority"),
                    ),
                    Effort(requests=800, most_s=4.0),
                )
            ],
        ),
        "loop": _tasks(
            "loop",
            [
                Task(
                    "decode+prefill",
                    (ALWAYS_BUSY,),
                    (
                        *("priorities", "masks 25", "masks 50", "yield d2", "move quarter"),
                        *("move half", "MPS 25", "MPS 50"),
                    ),
                    Effort(most_s=2.0),
                )
            ],
        ),
        "three": _tasks("three", [Task("three+vgg", (0.5,), calm, Effort(most_s=10.0))]),
        "overload": _tasks(
            "overload",
            [
                Task("bert+vgg", (0.95, 1.2), FEW, Effort(rounds=1), floor=floor)
                for floor in (0.0, 0.2)
            ],
        ),
        "shapes": _tasks(
            "shapes",
            [
                Task(pair, (0.35,), calm, quick, shape=shape)
                for pair, shape in (
                    ("bert+vgg", "bursts"),
                    ("alexnet+resnet152", "bursts"),
                    ("bert+vgg", "azure-code"),
                    ("bert+vgg", "azure-conv"),
                )
            ],
        ),
        "busy": _tasks(
            "busy",
            [
                Task(pair, (0.35,), ("yield d1", "yield d2"), quick, busy_cores=True)
                for pair in AT_ALL_LOADS[:2]
            ],
        ),
        "more": _tasks("more", [_full(pair) for pair in (*AT_ALL_LOADS[2:], *AT_ONE_LOAD[3:])]),
        "loads": _tasks("loads", [Task(pair, (0.2, 0.6), FEW, quick) for pair in AT_ONE_LOAD]),
        "claims": _tasks(
            "claims",
            [
                Task(pair, (0.35,), ("yield d2", "bound 1.5 careful", "bound 2.5 careful"), long)
                # Those first of which nothing was measured on 2026-11-16.
                for pair in (
                    *AT_ALL_LOADS[2:],
                    *AT_ONE_LOAD[3:],
                    *AT_ALL_LOADS[:2],
                    *AT_ONE_LOAD[:3],
                )
            ],
        ),
    }


def _full(pair: str) -> Task:
    loads = (0.35, 0.2, 0.6) if pair in AT_ALL_LOADS else (0.35,)
    ways = (*FULL, *OURS_APART) if pair in IN_PROCESSES else FULL
    return Task(pair, loads, ways, Effort(most_s=3.0), later_ways=LATER, again=True)


def _tasks(stage: str, tasks: Sequence[Task]) -> list[Part]:
    return [Part(stage, replace(task, stage=stage)) for task in tasks]


def scaled(part: Part, scale: float) -> Part:
    """With so much of the requests: for a rehearsal."""
    if part.task is None or scale == 1:
        return part
    effort = part.task.effort
    smaller = replace(
        effort,
        requests=max(20, round(scale * effort.requests)),
        brief=max(20, round(scale * effort.brief)),
        least_s=min(effort.least_s, 0.1),
    )
    return replace(part, task=replace(part.task, effort=smaller))


def other_seconds(part: Part) -> float:
    """Of what is no task."""
    return deaths.EXPECTED_S if part.stage == "deaths" else together.EXPECTED_S


def done_parts(folder: Path) -> dict[str, float]:
    """By name: the seconds that it took."""
    return {line["part"]: line["seconds"] for line in read_rows(folder / DONE)}


def note_done(folder: Path, part: Part, seconds: float) -> None:
    add_rows(folder / DONE, [{"part": part.name, "seconds": round(seconds, 1)}])


def fitting(
    parts: Sequence[Part], expected: Mapping[str, float], done: Mapping[str, float], left_s: float
) -> Part | None:
    """The next part that is not done and fits into the time left; None: there is none."""
    for part in parts:
        if part.name not in done and expected[part.name] <= left_s:
            return part
    return None
