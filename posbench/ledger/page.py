"""Findings as they are read: a table with what did not hold first, a section of each claim, and one picture."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from posbench.errors import UserError
from posbench.ledger.claim import Outcome
from posbench.ledger.outcome import Finding
from posbench.report import charts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BEGIN, END = "<!-- claims: written by `python scripts/claims.py` -->\n", "<!-- end of claims -->\n"
PICTURE = "claims"  # .png
ORDER: tuple[Outcome, ...] = ("contradicted", "supported", "open", "not learned", "not testable here", "not run")
_ABOUT_INTERVALS = (
    "Intervals are 95 %, of each claim alone. Outcomes go by p-values adjusted over all claims and two looks: a claim "
    "may be open although its interval lies on one side of its margin."
)
_COLOURS = {"contradicted": "#D55E00", "supported": "#0072B2", "open": charts.GREY}
assert set(ORDER) == set(get_args(Outcome))


def page(findings: Sequence[Finding]) -> str:
    """All findings as Markdown: in how many claims what was found, picture, table, sections."""
    rows = sorted(findings, key=lambda one: (one.outcome != "contradicted", ORDER.index(one.outcome)))
    lines = [summary(findings), ""]
    if any(one.interval for one in findings):
        lines += [f"![Intervals of the claims against their margins]({PICTURE}.png)", ""]
        lines += [_ABOUT_INTERVALS, ""]
    lines += ["| claim | outcome | ours | margin | published | predicted |", "|---|" + "---|" * 5]
    for one in rows:
        source, predicted = one.entry.claim.source, one.entry.claim.prediction.outcome
        said = f"[{markdown(one.entry.claim.sentence)}](#{one.entry.id})"
        published = markdown(source.published or "")
        cells = [said, one.outcome, told(one), _margin(one), published, predicted]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *map(_section, rows)])


def _section(one: Finding) -> str:
    claim, source = one.entry.claim, one.entry.claim.source
    found = f"**{one.outcome}**" + (f": {figure}" if (figure := told(one)) else "")
    where = f"{source.paper}{f', arXiv:{source.arxiv}' if source.arxiv else ''}, {source.where}"
    more = [f"Published: {source.published}."] if source.published else []
    more += [f"Scale: {source.scale}."] if source.scale else []
    said = " ".join([f"Source, read {source.read}: {where}: {source.says}.", *more])
    notes = [said, *([f"Note: {claim.note}."] if claim.note else [])]
    notes += [f"Predicted on {claim.prediction.made}: {claim.prediction.outcome}, since {claim.prediction.why}."]
    notes += [f"Cost: training its runs took {one.minutes:,.0f} CPU minutes."] if one.minutes else []
    lines = [f"- {markdown(note)}" for note in notes]
    test = f"{claim.figure}, {_margin(one)}" if claim.figure else _asked(one)
    lines += [f"- Test: {markdown(test)}; `posbench reproduce {one.entry.id}`", ""]
    return "\n".join([f"### {one.entry.id}\n", f"{markdown(claim.sentence)} {found}.\n", *lines])


def _margin(one: Finding) -> str:
    side = "above" if one.entry.direction > 0 else "below"
    return f"{side} {one.entry.margin:g}" if one.entry.claim.figure else "more seeds"


def _asked(one: Finding) -> str:
    asked = one.entry.claim.learned
    assert asked is not None
    return f"{asked.more} answers {asked.right:.0%} right at {asked.at:g}x in more seeds than {asked.than}"


def told(one: Finding) -> str:
    """The figure behind an outcome, or why there is none."""
    if one.interval is not None:
        seeds = f"{len(one.interval.seeds)} seeds"
        return f"{one.interval.mean:+.3f} ({one.interval.low():+.3f} to {one.interval.high():+.3f}, {seeds})"
    if one.shares is not None:
        (more, of), (than, of_than) = one.shares
        return f"{more} of {of} against {than} of {of_than} seeds"
    return one.why


def summary(findings: Sequence[Finding]) -> str:
    """How many claims have each outcome, and how many were predicted."""
    counted = Counter(one.outcome for one in findings)
    said = ", ".join(f"{counted[name]} {name}" for name in ORDER if counted[name])
    tested = [one for one in findings if one.p is not None]
    right = sum(one.entry.claim.prediction.outcome == one.outcome for one in tested)
    parts = [f"{number_of(findings)}: {said}."]
    parts += [f"{right} of {len(tested)} as predicted."] if tested else []
    return " ".join(parts)


def number_of(claims: Sequence[object]) -> str:
    return "1 claim" if len(claims) == 1 else f"{len(claims)} claims"


def markdown(text: str) -> str:
    """Return text in one line, escaped for Markdown and HTML."""
    escaped = re.sub(r"([\\`*|\[\]~])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# -- the page of the documentation -------------------------------------------------------------------------------------


def written(text: str, findings: Sequence[Finding]) -> str:
    """A page with these findings between its marks. Raises UserError if it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"expected a page with the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}{page(findings)}{end}{after}"


# -- the picture -------------------------------------------------------------------------------------------------------


def picture(findings: Sequence[Finding]) -> "Figure | None":
    """The interval of each claim from its margin, towards the claimed side; None without any."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = sorted((one for one in findings if one.interval), key=_beyond)
    if not shown:
        return None
    with matplotlib.rc_context(charts.STYLE):
        figure = Figure(figsize=(8.6, 1.1 + 0.26 * len(shown)), layout="constrained")
        axis = figure.add_subplot()
        for place, one in enumerate(shown):
            assert one.interval
            ends = [one.entry.direction * (end - one.entry.margin) for end in (one.interval.low(), one.interval.high())]
            colour = _COLOURS.get(one.outcome, charts.GREY)
            axis.plot(ends, [place] * 2, color=colour, linewidth=2)
            axis.plot(_beyond(one), place, marker="o", color=colour)
        axis.axvline(0, color=charts.DARK)
        axis.set_xscale("symlog", linthresh=0.1)
        low, high = axis.get_xlim()
        ticks = [tick for tick in (-10, -1, -0.1, 0, 0.1, 1, 10) if low <= tick <= high]
        axis.set_xticks(ticks, [f"{tick:+g}" if tick else "margin" for tick in ticks])
        axis.minorticks_off()
        axis.set_yticks(range(len(shown)), [f"{one.entry.id} ({one.outcome})" for one in shown])
        axis.set_xlabel("nats per token beyond the margin, to the right as claimed")
    return figure


def _beyond(one: Finding) -> float:
    assert one.interval
    return one.entry.direction * (one.interval.mean - one.entry.margin)
