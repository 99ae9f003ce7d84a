"""The report: one self-contained HTML file, made for three questions.

Which way of sharing should I take? What does it do to each of my models? What does the plan do?
Styles, script and data are in the file. Modelled values are marked as modelled. Text from files is
untrusted: the template escapes text, and packed data contains no HTML characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup, escape

from eclip.core.made import Made
from eclip.core.model_key import ModelKey
from eclip.core.profile import Profile
from eclip.core.topology import Topology
from eclip.reports import choosing, inside, per_model
from eclip.reports.chapters import Chapter
from eclip.reports.drawing import Points, Scatter
from eclip.reports.inside import Inside, LaneCost
from eclip.reports.labels import count, duration, palette, units_title
from eclip.reports.per_model import ModelCard
from eclip.reports.verdict import Verdict, judge

TextTable = tuple[list[str], list[list[str]]]
_HYPHENATED = re.compile(r"\b(?:[a-z]+(?:-\d+)+|\d+-\d+)\b")  # a policy with numbers, slices


@dataclass(frozen=True)
class Section:
    """A chapter, ready to be written."""

    number: int
    mix: str
    verdict: Verdict
    load: str  # where another section has the same mix; else empty
    origin: str  # modelled, measured, or planned where nothing ran
    facts: list[tuple[str, str]]
    command: str
    warnings: list[str]
    left_out: list[str]
    heads: list[choosing.WayHead]
    columns: list[choosing.BarColumn]
    numbers: TextTable
    frontier: Scatter | None
    legend: list[Points]
    trials: TextTable
    serving: bool
    cards: list[ModelCard]
    insides: list[Inside]
    costs: list[LaneCost]
    unit: str


def render(chapters: Sequence[Chapter], profiles: Mapping[ModelKey, Profile]) -> str:
    """The HTML text. ``profiles`` are looked up by ``model:batch``; one may be missing."""
    mixes = [chapter.mix for chapter in chapters]
    sections = [
        _section(number, one, one.load if mixes.count(one.mix) > 1 else "", profiles)
        for number, one in enumerate(chapters, start=1)
    ]
    most = max(len(chapter.workers) for chapter in chapters)
    return template("report.html").render(
        sections=sections, light=palette(most), dark=palette(most, dark=True)
    )


def _section(
    number: int, chapter: Chapter, load: str, profiles: Mapping[ModelKey, Profile]
) -> Section:
    verdict = judge(chapter)
    scatter = choosing.frontier(chapter, verdict)
    shown = next(iter(chapter.plans), None)
    return Section(
        number=number,
        mix=chapter.mix,
        verdict=verdict,
        load=load,
        origin=_origin(chapter),
        facts=_facts(chapter, None if shown is None else shown.topology),
        command="; ".join(dict.fromkeys(made.command for made in chapter.made)),
        warnings=list(chapter.warnings),
        left_out=list(chapter.left_out),
        heads=choosing.heads(chapter, verdict),
        columns=choosing.columns(chapter, verdict),
        numbers=choosing.all_numbers(chapter),
        frontier=scatter,
        legend=_legend(scatter),
        trials=choosing.trial_table(chapter),
        serving=bool(chapter.services),
        cards=per_model.cards(chapter, verdict) if chapter.ran else [],
        insides=inside.insides(chapter, verdict.take),
        costs=inside.lane_costs(chapter, profiles),
        unit="unit" if shown is None else shown.topology.unit_name,
    )


def _legend(scatter: Scatter | None) -> list[Points]:
    """Each kind once."""
    return list({one.name: one for one in (scatter.sets if scatter else ())}.values())


def _origin(chapter: Chapter) -> str:
    """Of what ran; a chapter never mixes both."""
    if not chapter.ran:
        return "planned"
    return "modelled" if chapter.ran[0].modelled else "measured"


def _facts(chapter: Chapter, topology: Topology | None) -> list[tuple[str, str]]:
    ran = chapter.ran

    def distinct(values: Sequence[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    facts = [
        ("models", ", ".join(map(str, chapter.models))),
        ("device", distinct([way.device for way in ran or chapter.ways])),
    ]
    if topology is not None:
        slices = count(len(topology.slice_units), "slice")
        units = units_title(chapter.plans[0], topology.units)
        facts.append(("units", f"{units} in {slices}"))
    facts.append(("load", chapter.load))
    if ran:
        rounds = max(len(way.runs) for way in ran)
        seconds = [duration(1e9 * run.seconds) for way in ran for run in way.runs]
        facts.append(("runs", f"{count(rounds, 'round')} of {distinct(seconds)} each"))
        seeds = [str(way.seed) for way in ran if way.seed is not None]
        facts.append(("seed", distinct(seeds)))
    facts += _made(chapter.made)
    files = [name for way in chapter.ways for name in way.file.split(", ") if name]
    if files:
        facts.append(("files", distinct(files)))
    return facts


def _made(all_made: Sequence[Made]) -> list[tuple[str, str]]:
    if not all_made:
        return [("date", "not recorded")]
    dates = sorted({made.date[:16].replace("T", " ") for made in all_made})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = dict.fromkeys(made.eclip for made in all_made)
    return [("date", f"{when} UTC"), ("eclip", ", ".join(versions))]


def template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eclip.reports", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"keep_whole": keep_whole, "break_at_commas": break_at_commas}
    return environment.get_template(name)


def keep_whole(text: str) -> Markup:
    """No line ends inside ``launches-16-8`` or slices ``13-15``."""
    return Markup(_HYPHENATED.sub(r'<span class="whole">\g<0></span>', str(escape(text))))


def break_at_commas(mix: str) -> Markup:
    """Where a mix does not fit a line, it goes on with the next model."""
    return Markup(",<wbr>").join(mix.split(","))
