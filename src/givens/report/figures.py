"""The pictures of a report, each with its words."""

from collections.abc import Iterator, Sequence
from html import escape

from givens.report.findings import Entry
from givens.report.svg import Axis, Series, chart, heat_map

COLOURS = 8


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


STEP = Axis("step", write=_whole)
RECALL = Axis("recall", write=_percent)


def learning(entries: list[Entry]) -> Iterator[str]:
    """Distortion and recall against the step."""
    curves = _curves(entries, "distortion", "{:.4f}")
    # An index that is built afterwards has a distortion at the end alone.
    for colour, run in ((colour, entry.run) for colour, entry in _coloured(entries)):
        if not run.joint and run.rows and run.distortion is not None:
            at = [(run.rows[-1]["step"], run.distortion)]
            value = f"{run.distortion:.4f}"
            curves.append(Series(run.label, colour, at, line=False, value=value))
    axis = Axis("distortion", write=lambda value: f"{value:.4g}")
    words = "Mean squared error of all items, from where the index comes in; the numbers: its end."
    yield _figure("Distortion against step", words, curves, STEP, axis)
    curves = _curves(entries, "recall", "{:.1%}")
    alone = [
        Series(e.run.label, c, points, dashed=True, value=_percent(points[-1][1]))
        for c, e in _coloured(entries)
        if (points := _points(e, "recall", "towers"))
    ]
    words = "Of the validation users, at the last look. "
    words += "Dashed: the towers alone, in full precision." if alone else "By the index."
    shown = {one.name for one in curves}
    others = [one for one in alone if one.name not in shown]
    under = [one for one in alone if one.name in shown]
    yield _figure("Recall against step", words, curves + others, STEP, RECALL, under)


def serving(entries: list[Entry]) -> Iterator[str]:
    """Recall against bytes and against speed."""
    done = [(c, e.run, e.seen) for c, e in _coloured(entries) if e.seen is not None]
    if not done:
        yield "<p>None of the runs is finished, so there is no index to look at.</p>"
        return
    index, full, speeds, flat = [], [], [], []
    for c, run, seen in done:
        name, *ways, brute = f"{run.label}, full precision", *seen.speeds
        at = (run.bytes, run.recall or 0.0)
        value = f"{_percent(at[1])} at {run.bytes}"
        index.append(Series(run.label, c, [at], line=False, value=value))
        at = (4 * run.options["dim"], run.found("full") or 0.0)
        full.append(Series(name, c, [at], line=False, hollow=True))
        points = [(way.recall, way.queries_a_second) for way in ways]
        rates = [f"{way.way} {way.queries_a_second:,.0f}" for way in (ways[0], *ways[1:][-1:])]
        value = f"{', '.join(rates)}, ring {brute.queries_a_second:,.0f}"
        # Numbers of lists; what the two ends of a line to FastScan are is told in words.
        notes = [way.way.split()[0] for way in ways] if ways[-1].way.endswith("lists") else ()
        lined = len(ways) > 1
        speeds.append(Series(run.label, c, points, line=lined, notes=notes, value=value))
        point = (brute.recall, brute.queries_a_second)
        flat.append(Series(name, c, [point], line=False, hollow=True))
    words = "Of the test users. Rings: full precision, by the same towers without the index."
    size = Axis("bytes an item", log=True, write=_whole)
    yield _figure("Recall against bytes", words, index, size, RECALL, full)
    words = (
        "Test users asked one after another, on one thread of the machine that wrote this page. "
        "Rings: full precision by brute force."
    )
    kinds = {way.way.split()[-1] for _, _, seen in done for way in seen.speeds}
    if "lists" in kinds:
        words += " Numbers beside points: lists that are looked into."
    if "FastScan" in kinds:
        words += " Lines go up to the FastScan form of the same codes (--kind pq-fastscan)."
    rate = Axis("queries a second", write=_whole, zero=True)
    yield _figure("Search speed against recall", words, speeds, RECALL, rate, flat)


def parts(entries: list[Entry]) -> Iterator[str]:
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
            "Items of a codeword, the most used first, the mean over subspaces; a level line would "
            "be all alike."
        )
        rank, items = Axis("codeword", write=_whole), Axis("items", write=_whole, zero=True)
        yield _figure("Codeword use", words, curves, rank, items)
    curves = _curves(entries, "orthogonality", "{:.1e}")
    if curves:
        worst = max(value for one in curves for _, value in one.points)
        words = f"How far R is from a rotation, in float32: {worst:.1e} at most in these runs."
        axis = Axis("max|RᵀR − I|", log=True, write=lambda value: f"{value:.1g}")
        yield _figure("Orthogonality error", words, curves, STEP, axis)
    yield from _turning(entries)


def _turning(entries: list[Entry]) -> Iterator[str]:
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
        "From where the index came in to its end, R turned n/2 planes, each by an angle of its own."
    )
    degrees = Axis("degrees", zero=True, write=lambda value: f"{value:g}°")
    plane = Axis("plane, the most turned first", write=_whole)
    yield _figure("How far each plane has turned", words + told, curves, plane, degrees)
    offs = [(turn.M - turn.M.diagonal().diag()).abs() for _, _, turn in moved]
    most = max((float(off.max()) for off in offs), default=1.0)
    for (_, run, turn), off in zip(moved, offs, strict=True):
        words = (
            f"Off the diagonal of R₀ᵀR: how much of an axis at the start (row) is in one at the "
            f"end (column), up to {float(off.max()):.2f}. {100 * turn.between:.0f} % of it, by "
            f"squares, is between the {run.options['subspaces']} subspaces, where it changes codes."
        )
        title = f"R's change, {run.label}"
        yield _framed(title, words, heat_map(off, most, alt=f"{title}. {words}"))


def _coloured(entries: list[Entry]) -> list[tuple[int, Entry]]:
    return [(number % COLOURS, entry) for number, entry in enumerate(entries)]


def _points(entry: Entry, name: str, phase: str) -> list[tuple[float, float]]:
    rows = [row for row in entry.run.rows if row["phase"] == phase]
    return [(row["step"], row[name]) for row in rows]


def _curves(entries: list[Entry], name: str, form: str) -> list[Series]:
    """A number against the step, of all runs that have looked at it with the index."""
    return [
        Series(e.run.label, c, points, value=form.format(points[-1][1]).replace("%", " %"))
        for c, e in _coloured(entries)
        if (points := _points(e, name, "joint"))
    ]


def _figure(
    title: str,
    words: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    under: Sequence[Series] = (),
) -> str:
    """A chart with a legend of its series; those under them are drawn without."""
    if not series:
        return _framed(title, words, "<p>No run has come so far.</p>")
    told = "; ".join(f"{one.name} {one.value}" for one in series)
    picture = chart([*under, *series], x, y, alt=f"{title}. {words} {told}.")
    legend = "".join(
        f'<li class="s{one.colour}"><span>{escape(one.name)}</span><b>{escape(one.value)}</b></li>'
        for one in series
    )
    return _framed(title, words, f'{picture}<ul class="legend">{legend}</ul>')


def _framed(title: str, words: str, inside: str) -> str:
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p></figcaption>"
        f"{inside}</figure>"
    )
