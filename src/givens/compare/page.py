"""The page of a comparison: advice, pictures, a table and the measurement's settings."""

import math
from collections.abc import Iterable
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from givens.report.svg import Axis, Series, chart

Row = dict[str, Any]

# Families of methods, which share a colour.
FAMILIES = {
    "givens": ("givens", "givens-fastscan", "givens-ivf"),
    "Faiss PQ": ("pq",),
    "Faiss OPQ": ("opq-identity", "opq-default"),
    "RaBitQ": ("rabitq", "rabitq-fastscan", "rabitq-ivf"),
    "scalar quantizers": ("sq8", "sq6", "sq4", "fp16"),
    "additive quantizers": ("prq", "rq", "lsq"),
    "PCA + PQ": ("pca-pq",),
    "TurboQuant": ("turboquant",),
}
# Recalls differ if they are this many standard errors apart.
ERRORS = 2.0
PERCENT = Axis("recall@10", write=lambda value: f"{100 * value:.0f} %")
SPEED = Axis(
    "queries a second",
    log=True,
    write=lambda value: f"{value / 1000:,.3g}k" if value >= 1000 else f"{value:,.3g}",
)
BYTES = Axis("bytes a vector", log=True, write=lambda value: f"{value:,.0f}")


def page(result: dict[str, Any]) -> str:
    """The whole page, self-contained."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = resources.files("givens.compare").joinpath("page.html").read_text("utf-8")
    style = resources.files("givens.report").joinpath("page.css").read_text("utf-8")
    rows = result["rows"]
    return environment.from_string(template).render(
        style=style,
        advice=advice(result),
        pictures=list(_pictures(rows)),
        rows=sorted(rows, key=lambda row: (row["budget"], -row["recall@10"])),
        best={budget: _best(_flat(rows, budget)) for budget in _budgets(rows)},
        colours={m: number for number, names in enumerate(FAMILIES.values()) for m in names},
        **{name: result[name] for name in ("configuration", "data", "environment", "left_out")},
    )


def advice(result: dict[str, Any]) -> list[str]:
    """A recommendation for all budgets together, and a sentence for each budget."""
    rows, dim = result["rows"], result["data"]["dim"]
    if not rows:
        return ["Nothing was measured: there was no time for any method, or none fits the bytes."]
    lines, winners = [], []
    for budget in _budgets(rows):
        there = _flat(rows, budget)
        if not there:
            continue
        best, *others = sorted(there, key=lambda row: -row["recall@10"])
        bits = 8 * best["bytes"] / dim
        density = f"{bits:.2g} bit{'s' * (bits != 1)} a dimension"
        level = [row for row in others if _are_level(best, row)]
        winners.append((budget, best, level))
        line = (
            f"At {budget} bytes ({density}): {best['name']} finds "
            f"{_percent(best['recall@10'])} of the 10 nearest"
        )
        if best["reranked_recall@10"] < 0.9995:
            line += f", {_percent(best['reranked_recall@10'])} when 100 are ranked again"
        other = next((row for row in others if not _are_level(best, row)), None)
        if level:
            line += f"; level with it within two standard errors: {_names(level)}"
        if other is not None:
            line += f"; then {other['name']} with {_percent(other['recall@10'])}"
        lines.append(line + ".")
    return [_summary(winners), *lines] if winners else lines


def _summary(winners: list[tuple[int, Row, list[Row]]]) -> str:
    """The recommendation, grouped by budgets."""
    spans: list[tuple[str, list[int]]] = []
    for budget, best, level in winners:
        # Among level methods, the one that won at fewer bytes, or trains fastest.
        names = {_family(row): row for row in (best, *level)}
        last = spans[-1][0] if spans else ""
        quickest = min((best, *level), key=lambda row: row["train_seconds"])
        name = last if last in names else _family(quickest)
        if spans and spans[-1][0] == name:
            spans[-1][1].append(budget)
        else:
            spans.append((name, [budget]))
    parts = [f"{_title(name)} at {_join(map(str, sizes))} bytes" for name, sizes in spans]
    return f"For these vectors take {_join(parts)}."


def _title(family: str) -> str:
    return {
        "givens": "a product quantizer with a learned rotation (givens)",
        "Faiss PQ": "a plain product quantizer",
        "scalar quantizers": "a scalar quantizer",
        "additive quantizers": "an additive quantizer",
    }.get(family, family)


def _pictures(rows: list[Row]) -> Iterable[dict[str, Any]]:
    """Recall against bytes, with and without re-ranking, and against speed for each budget."""
    for key, title, words in (
        ("recall@10", "Recall against bytes", "What the codes alone find."),
        (
            "reranked_recall@10",
            "Recall after re-ranking",
            "The 100 best by the codes are ranked again by the exact vectors.",
        ),
    ):
        series = []
        for colour, (family, names) in enumerate(FAMILIES.items()):
            points = []
            for budget in _budgets(rows):
                mine = [row for row in _flat(rows, budget) if row["method"] in names]
                if mine:
                    best = max(mine, key=lambda row: row[key])
                    points.append((best["bytes"], best[key]))
            if points:
                points.sort()
                series.append(Series(family, colour, points))
        if series:
            yield _picture(title, f"{words} The best of each family.", series, BYTES)
    for budget in _budgets(rows):
        series = []
        for colour, (family, names) in enumerate(FAMILIES.items()):
            flat = [row for row in _flat(rows, budget) if row["method"] in names]
            lists = [
                row
                for row in rows
                if (row["budget"], row["form"]) == (budget, "ivf") and row["method"] in names
            ]
            if flat:
                points = [(row["recall@10"], row["queries_a_second"]) for row in flat]
                series.append(Series(family, colour, points, line=False))
            if lists:
                points = sorted((row["recall@10"], row["queries_a_second"]) for row in lists)
                label = f"{family}, inverted file"
                series.append(Series(label, colour, points, dashed=True))
        if series:
            words = "Up and to the right is better. Lines: an inverted file at nprobe 1, 4, 16, 64."
            yield _picture(f"Recall against speed, {budget} bytes", words, series, PERCENT, SPEED)


def _picture(
    title: str, words: str, series: list[Series], x: Axis, y: Axis = PERCENT
) -> dict[str, Any]:
    drawn = chart(series, x, y, alt=title)
    # The SVG is escaped already.
    return {"title": title, "words": words, "series": series, "svg": Markup(drawn)}


def _budgets(rows: list[Row]) -> list[int]:
    return sorted({row["budget"] for row in rows})


def _flat(rows: list[Row], budget: int) -> list[Row]:
    """The rows without inverted lists, whose bytes are those of the code."""
    return [row for row in rows if row["budget"] == budget and row["form"] != "ivf"]


def _best(rows: list[Row]) -> float:
    return max((row["recall@10"] for row in rows), default=math.nan)


def _are_level(one: Row, other: Row) -> bool:
    """Whether two recalls do not differ significantly."""
    error = math.hypot(one["recall@10_error"], other["recall@10_error"])
    return bool(abs(one["recall@10"] - other["recall@10"]) <= ERRORS * error)


def _family(row: Row) -> str:
    return next(family for family, names in FAMILIES.items() if row["method"] in names)


def _names(rows: list[Row]) -> str:
    return _join(dict.fromkeys(row["name"] for row in rows))


def _join(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
