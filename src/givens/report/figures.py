"""The figures of a report, each with a caption of one sentence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from givens.report.findings import Entry
from givens.report.svg import Axis, Series, chart, heat_map

COLOURS = 8
INDEX, FULL = "by the index", "in full precision"


@dataclass(frozen=True)
class Figure:
    """A picture with its caption, and its series by legend."""

    title: str
    words: str
    picture: Markup
    legends: Sequence[tuple[str, Sequence[Series]]] = ()


def _format_count(value: float) -> str:
    return f"{value:,.0f}"


def _format_percent(value: float) -> str:
    return f"{100 * value:.1f} %"


STEP = Axis("step", write=_format_count)
RECALL = Axis("recall", write=_format_percent)


def draw_learning(entries: list[Entry]) -> Iterator[Figure]:
    """Draw distortion and recall against the step."""
    curves = _make_curves(entries, "distortion", "{:.4f}")
    # A post-hoc index has a distortion only at the end.
    for colour, run in ((colour, entry.run) for colour, entry in _number_colours(entries)):
        if not run.joint and run.rows and run.distortion is not None:
            at = [(run.rows[-1]["step"], run.distortion)]
            value = f"{run.distortion:.4f}"
            curves.append(Series(run.label, colour, at, line=False, value=value))
    axis = Axis("distortion", write=lambda value: f"{value:.4g}")
    words = (
        "The error of the codes, as the mean squared distance of items from what the index holds "
        "of them: lower is better, and the numbers are those of the index that is kept."
    )
    yield _make_figure("Distortion against step", words, STEP, axis, [("", curves)])
    curves = _make_curves(entries, "recall", "{:.1%}")
    alone = [
        Series(
            e.run.label,
            c,
            points,
            dashed=True,
            value=_format_percent(max(value for _, value in points)),
        )
        for c, e in _number_colours(entries)
        if (points := _select_points(e, "recall", "towers"))
    ]
    words = (
        "The part of what validation users liked next that is among the items they are given, by "
        "the towers alone (dashed) and then by the index: higher is better, and the numbers are "
        "those of the step that is kept."
    )
    legends = [(INDEX, curves), (FULL, alone)]
    yield _make_figure("Recall against step", words, STEP, RECALL, legends)


def draw_serving(entries: list[Entry]) -> Iterator[Figure]:
    """Draw recall against bytes and against speed."""
    done = [(c, e.run, e.seen) for c, e in _number_colours(entries) if e.seen is not None]
    if not done:
        none = Markup("<p>None of the runs is finished, so there is no index to look at.</p>")
        yield Figure("Recall against bytes", "", none)
        return
    index, full, speeds, flat = [], [], [], []
    for c, run, seen in done:
        *ways, brute = seen.speeds
        at = (run.bytes, run.recall or 0.0)
        value = f"{_format_percent(at[1])} at {run.bytes} bytes"
        index.append(Series(run.label, c, [at], line=False, value=value))
        at = (4 * run.options["dim"], run.find_recall("full") or 0.0)
        value = f"{_format_percent(at[1])} at {at[0]:,} bytes"
        full.append(Series(run.label, c, [at], line=False, hollow=True, value=value))
        points = [(way.recall, way.queries_a_second) for way in ways]
        rates = [f"{way.way} {way.queries_a_second:,.0f}" for way in (ways[0], *ways[1:][-1:])]
        # Numbers of lists; the caption explains the line to FastScan.
        notes = [way.way.split()[0] for way in ways] if ways[-1].way.endswith("lists") else ()
        lined = len(ways) > 1
        speeds.append(Series(run.label, c, points, line=lined, notes=notes, value=", ".join(rates)))
        point = (brute.recall, brute.queries_a_second)
        value = f"{brute.queries_a_second:,.0f}"
        flat.append(Series(run.label, c, [point], line=False, hollow=True, value=value))
    words = (
        "The memory that one item takes, against the part of what test users liked next that they "
        "are given: up and to the left is better, and rings are the same towers without an index."
    )
    size = Axis("bytes an item", log=True, write=_format_count)
    yield _make_figure("Recall against bytes", words, size, RECALL, [(INDEX, index), (FULL, full)])
    words = (
        "The users that one thread of the machine that wrote this page answers in a second, "
        "against what they are given: up and to the right is better, and rings are exact search "
        "in full precision"
    )
    kinds = {way.way.split()[-1] for _, _, seen in done for way in seen.speeds}
    if "lists" in kinds:
        words += "; a number beside a point says how many lists are searched"
    if "FastScan" in kinds:
        words += "; a line leads to the same codes in FastScan form (--kind pq-fastscan)"
    words += "."
    rate = Axis("queries a second", write=_format_count, zero=True)
    legends = [(INDEX, speeds), (FULL, flat)]
    yield _make_figure("Search speed against recall", words, RECALL, rate, legends)


def draw_parts(entries: list[Entry]) -> Iterator[Figure]:
    """Draw the usage of codewords, the rounding error of R, and how far R has turned."""
    curves = []
    for c, entry in _number_colours(entries):
        if entry.seen is not None:
            ranked = entry.seen.counts.sort(descending=True).values.double().mean(0)
            points = [(number + 1, float(value)) for number, value in enumerate(ranked)]
            unused = f"{int((entry.seen.counts == 0).sum())} unused"
            curves.append(Series(entry.run.label, c, points, value=unused))
    if curves:
        words = (
            "The number of items that share a codeword, from the most to the least used one: the "
            "flatter the line, the better the code is used."
        )
        rank, items = (
            Axis("codeword", write=_format_count),
            Axis("items", write=_format_count, zero=True),
        )
        yield _make_figure("Codeword use", words, rank, items, [("", curves)])
    curves = _make_curves(entries, "orthogonality", "{:.1e}")
    if curves:
        worst = max(value for one in curves for _, value in one.points)
        words = (
            "The rounding error of R, which must be a rotation: at most "
            f"{worst:.1e} in these runs, where an index is refused from 1e-4 on."
        )
        axis = Axis("max|RᵀR − I|", log=True, write=lambda value: f"{value:.1g}")
        yield _make_figure("Orthogonality error", words, STEP, axis, [("", curves)])
    yield from _draw_turning(entries)


def _draw_turning(entries: list[Entry]) -> Iterator[Figure]:
    """Draw the angles of R's planes, and how R mixes axes."""
    turns = [
        (c, e.run, e.seen.turn)
        for c, e in _number_colours(entries)
        if e.seen is not None and e.seen.turn is not None
    ]
    moved = [(c, run, turn) for c, run, turn in turns if turn.moved]
    still = ", ".join(run.label for _, run, turn in turns if not turn.moved)
    unmoved = f"; that of {still} is where it started" if still else ""
    curves = []
    for c, run, turn in moved:
        points = [(number + 1, float(angle)) for number, angle in enumerate(turn.angles)]
        value = f"up to {points[0][1]:.1f}°"
        curves.append(Series(run.label, c, points, value=value))
    if not moved and not still:
        return
    words = (
        "How far training has turned R since the index was started: a rotation turns each of its "
        f"n/2 planes by an angle{unmoved}."
    )
    degrees = Axis("degrees", zero=True, write=lambda value: f"{value:g}°")
    plane = Axis("plane, the most turned first", write=_format_count)
    title = "How far each plane has turned"
    yield _make_figure(title, words, plane, degrees, [("", curves)])
    offs = [(turn.M - turn.M.diagonal().diag()).abs() for _, _, turn in moved]
    most = max((float(off.max()) for off in offs), default=1.0)
    for (_, run, turn), off in zip(moved, offs, strict=True):
        words = (
            f"How much of each axis at the start (row) is in each axis at the end (column), up to "
            f"{float(off.max()):.2f}; {100 * turn.between:.0f} % of it, by squares, is between the "
            f"{run.options['subspaces']} subspaces, where it changes codes."
        )
        title = f"R's change, {run.label}"
        yield Figure(title, words, heat_map(off, most, alt=f"{title}. {words}"))


def _number_colours(entries: list[Entry]) -> list[tuple[int, Entry]]:
    return [(number % COLOURS, entry) for number, entry in enumerate(entries)]


def _select_points(entry: Entry, name: str, phase: str) -> list[tuple[float, float]]:
    rows = [row for row in entry.run.rows if row["phase"] == phase]
    return [(row["step"], row[name]) for row in rows]


def _make_curves(entries: list[Entry], name: str, form: str) -> list[Series]:
    """A quantity against the step in the joint phase, for all runs.

    Each legend shows the value at the step that is kept, or at the last one so far.
    """
    curves = []
    for c, e in _number_colours(entries):
        if points := _select_points(e, name, "joint"):
            value = form.format(_find_value(points, e.run.kept)).replace("%", " %")
            curves.append(Series(e.run.label, c, points, value=value))
    return curves


def _find_value(points: list[tuple[float, float]], step: int | None) -> float:
    """The value at a step, or at the last one if the step is missing."""
    return next((value for at, value in points if at == step), points[-1][1])


def _make_figure(
    title: str, words: str, x: Axis, y: Axis, legends: Sequence[tuple[str, Sequence[Series]]]
) -> Figure:
    """A chart with its legends; the first legend's series are drawn on top."""
    series = [one for _, group in reversed(legends) for one in group]
    if not series:
        return Figure(title, words, Markup("<p>No run has come so far.</p>"))
    values = "; ".join(f"{one.name} {one.value}" for one in series)
    picture = chart(series, x, y, alt=f"{title}. {words} {values}.")
    heads = legends if all(group for _, group in legends) else [("", group) for _, group in legends]
    return Figure(title, words, picture, heads)
