"""The pictures of a report: who looks how, which panel shows what, and that nothing lies on something else."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from fake_study import SCHEMES, Truth, configured, demo_config, group_of, write_run, write_study
from matplotlib.text import Text

from posbench import encodings
from posbench.report import ends, families, figures, lines, styles
from posbench.report.comparison import summary
from posbench.report.comparison.load import Group
from posbench.report.comparison.summary import Summary

MANY = [
    "rope", "alibi", "none", "t5", "sinusoidal", "learned", "binary", "index", "sine", "minmax", "fire", "fox", "cope",
    "path", "shaw", "stick_breaking", "xpos", "yarn", "ntk", "pi", "llama3", "longrope", "p_rope", "partial_rope",
    "layered", "randomized", "not_installed",
]  # fmt: skip
SHORT = {"learned", "binary"}  # defined at the training length alone


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, list[Summary]]:
    """Two schemes of two seeds, one of them undefined beyond the training length."""
    chosen = {name: SCHEMES[name] for name in ("rope", "learned")}
    folder = write_study(tmp_path_factory.mktemp("outputs") / "fake", demo_config(), chosen, seeds=2)
    group = group_of(folder)
    return group, summary.summarise(group)


def of(study: tuple[Group, list[Summary]], schemes: list[tuple[str, str]]) -> tuple[Group, list[Summary]]:
    """The same study with schemes of these names and labels: each a bit higher than the one before."""
    full, short = sorted(study[1], key=lambda one: any(point.status != "ok" for point in one.plain.points))
    made = []
    for number, (name, label) in enumerate(schemes):
        of_kind = short if name in SHORT else full
        scheme = dataclasses.replace(of_kind.scheme, name=name, label=label)
        steeper = 3.0 if name == "index" else 0.04 * (number % 12)
        made.append(
            dataclasses.replace(of_kind, scheme=scheme, curves=[moved(curve, steeper) for curve in of_kind.curves])
        )
    return Group([one.scheme for one in made], {}), made


def moved(curve: summary.Curve, steeper: float) -> summary.Curve:
    points = []
    for point in curve.points:
        more = steeper * np.log2(point.ratio)
        rise = point.rise and dataclasses.replace(point.rise, mean=point.rise.mean + more)
        points.append(dataclasses.replace(point, nll=point.nll and point.nll + more, band=None, rise=rise))
    return summary.Curve(curve.kind, points)


@pytest.fixture(scope="module", autouse=True)
def settings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context(figures.SETTINGS):
        patch.setattr(figures, "DPI", 80)
        yield


# -- how a scheme looks ------------------------------------------------------------------------------------------------


def looks(found: dict[str, styles.Style]) -> set[tuple[str, str]]:
    return {(style.colour, style.mark) for style in found.values()}


def test_every_encoding_has_a_listed_look_and_no_two_the_same() -> None:
    own = {path.stem for path in Path(encodings.__file__).parent.glob("[!_]*.py")} - {"base"}
    assert own <= set(styles._LISTED)
    assert len(set(styles._LISTED.values())) == len(styles._LISTED)


def test_a_listed_scheme_looks_the_same_whatever_else_is_in_the_report() -> None:
    among = styles.assign([(name, name) for name in MANY] + [("rope", f"rope base={n}") for n in range(20)])
    for name in styles._LISTED.keys() & set(MANY):
        assert styles.assign([(name, name)])[name] == among[name], name
    assert among["rope"] == styles.Style("#0072B2", "o", "")


def test_no_two_schemes_of_a_report_share_colour_and_mark() -> None:
    variants = [("rope", f"rope base={n}") for n in range(25)] + [("alibi", f"alibi slopes={n}") for n in range(5)]
    schemes = [(name, name) for name in MANY] + variants + [(f"mine{n}", f"mine{n}") for n in range(20)]
    found = styles.assign(schemes)
    assert len(found) == len(schemes) == 77 and len(looks(found)) == 77
    assert found == styles.assign(reversed(schemes))


def test_beyond_eighty_schemes_the_dash_tells_those_of_one_look_apart() -> None:
    found = styles.assign([(f"mine{n}", f"mine{n}") for n in range(200)])
    assert len(looks(found)) == 80 and len(set(found.values())) == 200


def test_a_variant_has_the_colour_of_its_scheme_and_another_mark_and_dash() -> None:
    found = styles.assign([("rope", "rope"), ("rope", "rope base=16"), ("xpos", "xpos")])
    rope, variant = found["rope"], found["rope base=16"]
    assert variant.colour == rope.colour and variant.mark != rope.mark and (rope.dash, variant.dash[:1]) == ("", "6")
    # Where the scheme itself is not in the report, its first variant looks as it would.
    assert styles.assign([("rope", "rope base=16"), ("rope", "rope base=64")])["rope base=16"] == rope


# -- which row shows what ----------------------------------------------------------------------------------------------


def rows_of(study: tuple[Group, list[Summary]], names: list[str]) -> list[tuple[str, list[str]]]:
    _, summaries = of(study, [(name, name) for name in names])
    return [(title, [one.scheme.name for one in members]) for title, members in families.rows(summaries)]


def test_up_to_eight_schemes_share_a_row(study: tuple[Group, list[Summary]]) -> None:
    assert rows_of(study, MANY[:8]) == [("", MANY[:8])]


def test_more_schemes_get_a_row_for_each_family(study: tuple[Group, list[Summary]]) -> None:
    names = ["rope", "xpos", "alibi", "t5", "fox", "sinusoidal", "learned", "randomized", "layered"]
    assert rows_of(study, names) == [
        ("input", ["sinusoidal", "learned"]),
        ("queries and keys", ["rope", "xpos"]),
        ("scores", ["alibi", "t5", "fox"]),
        ("other encodings", ["randomized", "layered"]),
    ]


def test_a_large_family_is_split(study: tuple[Group, list[Summary]]) -> None:
    rows = rows_of(study, MANY)
    assert sorted(name for _, names in rows for name in names) == sorted(MANY)
    assert all(len(names) <= families.MOST_TOGETHER for _, names in rows)
    assert [len(names) for title, names in rows if title.startswith("queries and keys (")] == [5, 4]


def test_every_row_shows_the_reference_and_the_windowed_baseline(study: tuple[Group, list[Summary]]) -> None:
    group, summaries = of(study, [(name, name) for name in MANY])
    rows = figures._rows(group, summaries, styles.assign((name, name) for name in MANY))
    for row in rows:
        greys = [line.label for line in row.level if line.style.colour == figures.GREY]
        own = [one.scheme.name for one in row.members]
        assert greys == ["rope, windowed"] if "rope" in own else ["rope", "rope, windowed"]
        assert [line.label for line in row.level if line.label not in greys] == own


# -- nothing lies on something else ------------------------------------------------------------------------------------


def test_things_are_pushed_apart() -> None:
    assert ends.apart([10, 50, 90], [10, 10, 10], 0, 100) == [10, 50, 90]
    assert ends.apart([50, 50], [10, 20], 0, 100) == [50, 65]
    assert ends.apart([99, -5], [10, 10], 0, 100) == [95, 5]


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    assert ends.wrapped("rope base=10000 rotary_dim=32") == "rope base=10000\nrotary_dim=32"
    cut = ends.wrapped("rope " + " ".join(f"option{n}=value{n}" for n in range(20)))
    assert cut.split()[:2] == ["rope", "option0=value0"] and cut.endswith("=value19") and "…" in cut
    assert max(map(len, cut.splitlines())) <= ends.NAME_WIDTH


VARIANTS = [("rope", f"rope base={base} rotary_dim={dim} layout=half") for base in (10000, 500) for dim in (32, 16, 8)]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "schemes",
    [
        pytest.param([(name, name) for name in MANY[:2]], id="2"),
        pytest.param([(name, name) for name in MANY[:8]], id="8"),
        pytest.param([(name, name) for name in MANY[:9]], id="9"),
        pytest.param([(name, name) for name in MANY], id="27"),
        pytest.param([*VARIANTS, *(("learned", f"learned rows={n}") for n in range(6))], id="variants"),
    ],
)
def test_nothing_is_cut_off_and_no_name_or_sign_lies_on_another(
    study: tuple[Group, list[Summary]], schemes: list[tuple[str, str]]
) -> None:
    figure = figures.draw(*of(study, schemes))
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0 and drawn.x1 <= width and drawn.y1 <= height
    panels = [axis.get_window_extent() for axis in figure.axes]
    shown = set()
    for axis in figure.axes:
        names = [text for text in axis.texts if type(text) is Text and not text.get_text().startswith("up to")]
        shown |= {re.split("\nun|\nup", text.get_text())[0] for text in names}
        boxes = [text.get_window_extent() for text in names]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert not any(box.overlaps(panel) for box in boxes for panel in panels)
    assert shown >= {ends.wrapped(label) for _, label in schemes}


@pytest.mark.full
def test_a_line_for_each_seed_where_they_part_in_two_groups(tmp_path: Path) -> None:
    for seed in range(5):
        write_run(tmp_path, configured(demo_config(), "fire", seed), Truth(3.67, 0.02 if seed < 3 else 0.3))
    group = group_of(tmp_path)
    (fire,) = summary.summarise(group)
    line = lines.rise(fire, fire.plain, styles.Style("#000000", "o", ""))
    assert len(line.seeds) == 5 and line.band == []
    assert line.top == max(points[-1][1] for points in line.seeds) > 1
    words = [text.get_text() for text in figures.draw(group, [fire]).axes[0].texts]
    assert "fire\nevery seed" in words
