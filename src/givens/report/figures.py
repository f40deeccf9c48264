"""The pictures of a report, each with its words."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from givens.report.findings import Entry
from givens.report.svg import Axis, Series, chart, heat_map

COLOURS = 8
STEP = Axis("step", write=lambda value: f"{value:,.0f}")
BYTES = Axis("bytes an item", log=True, write=lambda value: f"{value:,.0f}")
SPEED = Axis("queries a second", log=True, write=lambda value: f"{value:,.0f}")


def learning(entries: list[Entry]) -> Iterator[str]:
    """Distortion, recall and orthogonality against the step."""
    distortion = Axis("distortion", write=lambda value: f"{value:.4f}".rstrip("0"))
    curves = _curves(entries, "distortion")
    # An index that is built afterwards has a distortion at the end alone.
    curves += [
        Series(e.run.label, c, [(e.run.rows[-1]["step"], e.run.distortion)], line=False)
        for c, e in _coloured(entries)
        if not e.run.joint and e.run.rows and e.run.distortion is not None
    ]
    ends = _listed((one.name, f"{one.points[-1][1]:.4f}") for one in curves)
    yield _figure(
        "Distortion against step",
        f"Mean squared error of all items, from the index's start on. At the end: {ends}.",
        chart(curves, STEP, distortion, alt=f"Distortion against step; at the end {ends}")
        if curves
        else None,
        curves,
    )
    recall = Axis("recall", write=_percent)
    curves = _curves(entries, "recall")
    towers = [
        Series(e.run.label, c, _points(e, "recall", "towers"), dashed=True)
        for c, e in _coloured(entries)
    ]
    towers = [one for one in towers if one.points]
    best = _listed((one.name, _percent(max(value for _, value in one.points))) for one in curves)
    words = "Of the validation users, in decoded items."
    if towers:
        words += " Dashed: towers alone, in full precision."
    if best:
        words += f" The best look: {best}."
    yield _figure(
        "Recall against step",
        words,
        chart(towers + curves, STEP, recall, alt=f"Recall against step; {words}")
        if towers + curves
        else None,
        [*curves, *(one for one in towers if one.name not in {c.name for c in curves})],
    )
    curves = _curves(entries, "orthogonality")
    if curves:
        worst = max(value for one in curves for _, value in one.points)
        words = f"How far R is from a rotation: max|RᵀR − I|, at most {worst:.1e} in these runs."
        axis = Axis("max|RᵀR − I|", log=True, write=lambda value: f"{value:.1g}")
        yield _figure("Orthogonality error", words, chart(curves, STEP, axis, alt=words), curves)


def serving(entries: list[Entry]) -> Iterator[str]:
    """Recall against bytes and against speed, and how codewords are used."""
    done = [(c, e.run, e.seen) for c, e in _coloured(entries) if e.seen is not None]
    if not done:
        yield "<p>None of the runs is finished, so there is no index to look at.</p>"
        return
    index = [
        Series(run.label, c, [(run.bytes, run.recall or 0.0)], line=False) for c, run, _ in done
    ]
    full = [
        Series(
            f"{run.label}, full precision",
            c,
            [(4 * run.options["dim"], run.found("full") or 0.0)],
            line=False,
            hollow=True,
        )
        for c, run, _ in done
    ]
    recall = Axis("recall", write=_percent)
    told = _listed((run.label, f"{_percent(run.recall or 0)} at {run.bytes}") for _, run, _ in done)
    words = f"Of the test users. Rings: full precision, by the same towers. {told}."
    yield _figure(
        "Recall against bytes",
        words,
        chart(index + full, BYTES, recall, alt=f"Recall against bytes an item. {words}"),
        index,
    )
    speeds, flat = [], []
    for c, run, seen in done:
        *ways, brute = seen.speeds
        points = [(way.recall, way.queries_a_second) for way in ways]
        notes = [way.way.split()[0] for way in ways] if len(ways) > 1 else ()
        speeds.append(Series(run.label, c, points, line=len(ways) > 1, notes=notes))
        at = (brute.recall, brute.queries_a_second)
        flat.append(Series(f"{run.label}, full precision", c, [at], line=False, hollow=True))
    told = _listed(
        (
            run.label,
            f"{seen.speeds[-2].queries_a_second:,.0f} a second, in full precision "
            f"{seen.speeds[-1].queries_a_second:,.0f}",
        )
        for _, run, seen in done
    )
    words = (
        "Test users asked one after another on one thread of this machine, by Faiss. Rings: brute "
        f"force in full precision. {told}."
    )
    yield _figure(
        "Search speed against recall",
        words,
        chart(speeds + flat, recall, SPEED, alt=words),
        speeds,
    )
    curves, unused = [], []
    for c, run, seen in done:
        ranked = seen.counts.sort(descending=True).values.double().mean(0)
        curves.append(Series(run.label, c, [(i + 1, float(v)) for i, v in enumerate(ranked)]))
        empty = int((seen.counts == 0).sum())
        unused.append((run.label, f"{empty} of {seen.counts.numel():,} have no item"))
    words = (
        "Items of a codeword, the most used first, the mean over subspaces; a level line would be "
        f"all alike. {_listed(unused)}."
    )
    rank, items = Axis("codeword", write=STEP.write), Axis("items", write=STEP.write, zero=True)
    yield _figure("Codeword use", words, chart(curves, rank, items, alt=words), curves)


def turning(entries: list[Entry]) -> Iterator[str]:
    """The angles of R's planes, and which axes went into which."""
    turns = [
        (c, e.run, e.seen.turn)
        for c, e in _coloured(entries)
        if e.seen is not None and e.seen.turn is not None
    ]
    moved = [(c, run, turn) for c, run, turn in turns if turn.moved]
    still = [run.label for _, run, turn in turns if not turn.moved]
    if still:
        yield f"<p>{escape(', '.join(still))}: R was not turned, it is where it started.</p>"
    if not moved:
        if not still:
            yield "<p>None of the runs has both a start and an end of R to compare.</p>"
        return
    curves = [
        Series(run.label, c, [(i + 1, float(a)) for i, a in enumerate(turn.angles)])
        for c, run, turn in moved
    ]
    told = _listed(
        (
            run.label,
            f"up to {float(turn.angles[0]):.1f}°, {float(turn.angles.mean()):.1f}° on average",
        )
        for _, run, turn in moved
    )
    words = (
        "R₀ᵀR, from the index's start to its end, turns n/2 planes, each by an angle of its own. "
        f"{told}."
    )
    degrees = Axis("degrees", zero=True, write=lambda value: f"{value:g}°")
    plane = Axis("plane, the most turned first", write=STEP.write)
    yield _figure(
        "How far each plane has turned", words, chart(curves, plane, degrees, alt=words), curves
    )
    offs = [(turn.M - turn.M.diagonal().diag()).abs() for _, _, turn in moved]
    most = max(float(off.max()) for off in offs)
    for (_, run, turn), off in zip(moved, offs, strict=True):
        words = (
            "Off the diagonal of R₀ᵀR: how much of an axis at the start (row) is in an axis at the "
            f"end (column), up to {float(off.max()):.2f}. {100 * turn.between:.0f} % of it, by "
            f"squares, is between the {run.options['subspaces']} subspaces, where it changes codes."
        )
        yield _figure(f"R's change, {run.label}", words, heat_map(off, most, alt=words), ())


def _coloured(entries: list[Entry]) -> list[tuple[int, Entry]]:
    return [(number % COLOURS, entry) for number, entry in enumerate(entries)]


def _points(entry: Entry, name: str, phase: str) -> list[tuple[float, float]]:
    rows = [row for row in entry.run.rows if row["phase"] == phase]
    return [(row["step"], row[name]) for row in rows]


def _curves(entries: list[Entry], name: str) -> list[Series]:
    """A number against the step, of all runs that have looked at it with the index."""
    curves = [Series(e.run.label, c, _points(e, name, "joint")) for c, e in _coloured(entries)]
    return [one for one in curves if one.points]


def _figure(title: str, words: str, picture: str | None, series: Sequence[Series]) -> str:
    legend = "".join(f'<li class="s{s.colour}"><span>{escape(s.name)}</span></li>' for s in series)
    return (
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(words)}</p></figcaption>"
        f"{picture or '<p>No run has come so far.</p>'}"
        + (f'<ul class="legend">{legend}</ul>' if legend else "")
        + "</figure>"
    )


def _listed(pairs: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {value}" for name, value in pairs)


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
