"""The pictures of a report, each with a sentence on what it shows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from givens.report.findings import Entry
from givens.report.svg import Axis, Series, chart, heat_map

COLOURS = 8
INDEX, FULL = "by the index", "in full precision"


@dataclass(frozen=True)
class Figure:
    """A picture with its words, and its series by legend."""

    title: str
    words: str
    picture: Markup
    legends: Sequence[tuple[str, Sequence[Series]]] = ()


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


STEP = Axis("step", write=_whole)
RECALL = Axis("recall", write=_percent)


def learning(entries: list[Entry]) -> Iterator[Figure]:
    """Distortion and recall against the step."""
    curves = _curves(entries, "distortion", "{:.4f}", last=False)
    # An index that is built afterwards has a distortion at the end alone.
    for colour, run in ((colour, entry.run) for colour, entry in _coloured(entries)):
        if not run.joint and run.rows and run.distortion is not None:
            at = [(run.rows[-1]["step"], run.distortion)]
            value = f"{run.distortion:.4f}"
            curves.append(Series(run.label, colour, at, line=False, value=value))
    axis = Axis("distortion", write=lambda value: f"{value:.4g}")
    words = (
        "How far the items are from what the index holds of them (mean squared error): lower is "
        "better. The numbers: at the step whose index is kept."
    )
    yield _figure("Distortion against step", words, STEP, axis, [("", curves)])
    curves = _curves(entries, "recall", "{:.1%}")
    alone = [
        Series(e.run.label, c, points, dashed=True, value=_percent(points[-1][1]))
        for c, e in _coloured(entries)
        if (points := _points(e, "recall", "towers"))
    ]
    words = (
        "How much of what the validation users liked next they are given: higher is better. "
        "Dashed: the towers alone, before there is an index. The numbers: at the last step."
    )
    legends = [(INDEX, curves), (FULL, alone)]
    yield _figure("Recall against step", words, STEP, RECALL, legends)


def serving(entries: list[Entry]) -> Iterator[Figure]:
    """Recall against bytes and against speed."""
    done = [(c, e.run, e.seen) for c, e in _coloured(entries) if e.seen is not None]
    if not done:
        none = Markup("<p>None of the runs is finished, so there is no index to look at.</p>")
        yield Figure("Recall against bytes", "", none)
        return
    index, full, speeds, flat = [], [], [], []
    for c, run, seen in done:
        *ways, brute = seen.speeds
        at = (run.bytes, run.recall or 0.0)
        value = f"{_percent(at[1])} at {run.bytes} bytes"
        index.append(Series(run.label, c, [at], line=False, value=value))
        at = (4 * run.options["dim"], run.found("full") or 0.0)
        value = f"{_percent(at[1])} at {at[0]:,} bytes"
        full.append(Series(run.label, c, [at], line=False, hollow=True, value=value))
        points = [(way.recall, way.queries_a_second) for way in ways]
        rates = [f"{way.way} {way.queries_a_second:,.0f}" for way in (ways[0], *ways[1:][-1:])]
        # Numbers of lists; what the two ends of a line to FastScan are is told in words.
        notes = [way.way.split()[0] for way in ways] if ways[-1].way.endswith("lists") else ()
        lined = len(ways) > 1
        speeds.append(Series(run.label, c, points, line=lined, notes=notes, value=", ".join(rates)))
        point = (brute.recall, brute.queries_a_second)
        value = f"{brute.queries_a_second:,.0f}"
        flat.append(Series(run.label, c, [point], line=False, hollow=True, value=value))
    words = (
        "What an item takes in memory, and how much of what the test users liked next they are "
        "given: up and to the left is better. Rings: the same towers without the index."
    )
    size = Axis("bytes an item", log=True, write=_whole)
    yield _figure("Recall against bytes", words, size, RECALL, [(INDEX, index), (FULL, full)])
    words = (
        "How many test users are answered in a second, one after another on one thread of the "
        "machine that wrote this page: up and to the right is better. Rings: brute force over "
        "full precision."
    )
    kinds = {way.way.split()[-1] for _, _, seen in done for way in seen.speeds}
    if "lists" in kinds:
        words += " Numbers beside points: lists that are looked into."
    if "FastScan" in kinds:
        words += " Lines go up to the FastScan form of the same codes (--kind pq-fastscan)."
    rate = Axis("queries a second", write=_whole, zero=True)
    legends = [(INDEX, speeds), (FULL, flat)]
    yield _figure("Search speed against recall", words, RECALL, rate, legends)


def parts(entries: list[Entry]) -> Iterator[Figure]:
    """How codewords are used, how near R is to a rotation, and how far it has turned."""
    curves = []
    for c, entry in _coloured(entries):
        if entry.seen is not None:
            ranked = entry.seen.counts.sort(descending=True).values.double().mean(0)
            points = [(number + 1, float(value)) for number, value in enumerate(ranked)]
            unused = f"{int((entry.seen.counts == 0).sum())} unused"
            curves.append(Series(entry.run.label, c, points, value=unused))
    if curves:
        words = (
            "How many items share a codeword, from the most to the least used, the mean over "
            "subspaces: the more level the line, the more of the code is used."
        )
        rank, items = Axis("codeword", write=_whole), Axis("items", write=_whole, zero=True)
        yield _figure("Codeword use", words, rank, items, [("", curves)])
    curves = _curves(entries, "orthogonality", "{:.1e}")
    if curves:
        worst = max(value for one in curves for _, value in one.points)
        words = (
            "How far rounding has taken R from an exact rotation, on which the index counts: "
            f"{worst:.1e} at most in these runs; 1e-4 is refused when an index is made."
        )
        axis = Axis("max|RᵀR − I|", log=True, write=lambda value: f"{value:.1g}")
        yield _figure("Orthogonality error", words, STEP, axis, [("", curves)])
    yield from _turning(entries)


def _turning(entries: list[Entry]) -> Iterator[Figure]:
    """The angles of R's planes, and which axes went into which."""
    turns = [
        (c, e.run, e.seen.turn)
        for c, e in _coloured(entries)
        if e.seen is not None and e.seen.turn is not None
    ]
    moved = [(c, run, turn) for c, run, turn in turns if turn.moved]
    still = ", ".join(run.label for _, run, turn in turns if not turn.moved)
    told = f" {still}: R was not turned, it is where it started." if still else ""
    curves = []
    for c, run, turn in moved:
        points = [(number + 1, float(angle)) for number, angle in enumerate(turn.angles)]
        value = f"up to {points[0][1]:.1f}°"
        curves.append(Series(run.label, c, points, value=value))
    if not moved and not still:
        return
    words = (
        "A rotation turns n/2 planes, each by an angle of its own: how far training has turned "
        "those of R since the index came in. At 0° nothing was learned."
    )
    degrees = Axis("degrees", zero=True, write=lambda value: f"{value:g}°")
    plane = Axis("plane, the most turned first", write=_whole)
    title = "How far each plane has turned"
    yield _figure(title, words + told, plane, degrees, [("", curves)])
    offs = [(turn.M - turn.M.diagonal().diag()).abs() for _, _, turn in moved]
    most = max((float(off.max()) for off in offs), default=1.0)
    for (_, run, turn), off in zip(moved, offs, strict=True):
        words = (
            f"Which axes were mixed: a dot is the part of an axis at the start (row) in one at the "
            f"end (column), up to {float(off.max()):.2f}. {100 * turn.between:.0f} % of it, by "
            f"squares, is between the {run.options['subspaces']} subspaces, where it changes codes."
        )
        title = f"R's change, {run.label}"
        yield Figure(title, words, heat_map(off, most, alt=f"{title}. {words}"))


def _coloured(entries: list[Entry]) -> list[tuple[int, Entry]]:
    return [(number % COLOURS, entry) for number, entry in enumerate(entries)]


def _points(entry: Entry, name: str, phase: str) -> list[tuple[float, float]]:
    rows = [row for row in entry.run.rows if row["phase"] == phase]
    return [(row["step"], row[name]) for row in rows]


def _curves(entries: list[Entry], name: str, form: str, *, last: bool = True) -> list[Series]:
    """A number against the step, of all runs that have looked at it with the index.

    Told of each is its last one, or that of the index that is kept.
    """
    curves = []
    for c, e in _coloured(entries):
        if points := _points(e, name, "joint"):
            told = points[-1][1] if last or e.run.distortion is None else e.run.distortion
            value = form.format(told).replace("%", " %")
            curves.append(Series(e.run.label, c, points, value=value))
    return curves


def _figure(
    title: str, words: str, x: Axis, y: Axis, legends: Sequence[tuple[str, Sequence[Series]]]
) -> Figure:
    """A chart with its legends; the first one's series are drawn on top."""
    series = [one for _, group in reversed(legends) for one in group]
    if not series:
        return Figure(title, words, Markup("<p>No run has come so far.</p>"))
    told = "; ".join(f"{one.name} {one.value}" for one in series)
    picture = chart(series, x, y, alt=f"{title}. {words} {told}.")
    heads = legends if all(group for _, group in legends) else [("", group) for _, group in legends]
    return Figure(title, words, picture, heads)
