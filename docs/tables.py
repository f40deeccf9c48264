"""Tables of the pages, in Markdown, from the rows in results/.

A function takes what a results file holds (of several files, the rows of all) and gives the lines
of a table. A row that is missing is a ValueError, which stops the build of the pages.
"""

import statistics
from collections.abc import Callable
from typing import Any

from cells import (
    Rows,
    contenders,
    duration,
    factor,
    figures,
    grid,
    line,
    needed,
    percent,
    plain,
    select,
    spread,
    table,
    times,
    unique,
)

from givens.compare.page import FAMILIES, advice
from givens.paper import joint
from givens.retrieval.config import LABELS

MISSING = "–"
FITTED = {
    "givens gcd-greedy": "givens",
    "faiss opq identity": "Faiss OPQ, identity start",
    "faiss opq": "Faiss OPQ, default (random) start",
    "nanopq opq": "nanopq OPQ",
    "givens pq": "givens, without a rotation",
    "faiss pq": "Faiss PQ",
}
STEPS = {
    "gcd": "GCD, 16 pairings (the default)",
    "gcd-all": "GCD, all planes",
    "gcd-random": "GCD-R",
    "gcd-greedy": "GCD-G",
    "gcd-steepest": "GCD-S, approximate",
    "gcd-steepest-exact": "GCD-S, exact",
    "cayley": "Cayley",
    "torch-cayley": "Cayley, torch's parametrization",
    "geoopt": "geoopt (RiemannianAdam, Stiefel)",
    "expm": "matrix exponential",
    "geotorch": "geotorch (matrix exponential)",
    "svd": "projection by SVD",
    "pogo": "POGO (pogo-torch)",
    "pogo-products": "POGO, its six products alone",
    "pogo-products-tf32": "the same in TF32, off SO(n) by 1e-4",
    "rsdm": "RSDM",
    "landing": "Landing",
}
TOWERS = {"gcd": "GCD", "gcd-random": "GCD-R", "gcd-greedy": "GCD-G", "frozen": "frozen rotation"}
TOWERS |= {"cayley": "Cayley", "pogo": "POGO"}
LOGS = {
    "ml-1m": "MovieLens 1M",
    "amazon-book": "Amazon Books",
    "amazon-games": "Amazon Games",
    "built-in": "built-in log",
}
BASES = ("no_index", "frozen")
PEERS = ("faiss.read_index (OPQ+PQ)", "hnswlib", "usearch", "plain safetensors")


def fit(rows: Rows) -> list[str]:
    """Held-out distortion, training time and recall of each contender, by data and bytes."""
    cases = unique((row["data"], row["dim"], row["subspaces"]) for row in rows)
    heads = [f"{data}, n = {n}, {size} bytes" for data, n, size in cases]

    def values(name: str, case: tuple[str, int, int], key: str) -> list[float]:
        data, _, size = case
        mine = select(rows, contender=name, data=data, subspaces=size)
        return [row[key] for row in mine if key in row]

    def distortion(name: str, case: tuple[str, int, int]) -> str:
        found = values(name, case, "held_out")
        return figures(statistics.mean(found), 5) if found else MISSING

    def seconds(name: str, case: tuple[str, int, int]) -> str:
        ours = statistics.median(needed(values("givens gcd-greedy", case, "seconds"), name))
        found = values(name, case, "seconds")
        return factor(statistics.median(found) / ours) if found else MISSING

    def recall(name: str, case: tuple[str, int, int]) -> str:
        found = values(name, case, "recall_at_10")
        return percent(statistics.mean(found)) if found else MISSING

    searched = [case for case in cases if values("givens gcd-greedy", case, "recall_at_10")]
    names = contenders(rows, "contender", FITTED)
    return [
        *("**Distortion on held-out vectors**", ""),
        *grid(names, FITTED, cases, heads, distortion),
        *("", "**Training time, in times that of givens**", ""),
        *grid(names, FITTED, cases, heads, seconds),
        *("", "**recall@10**", ""),
        *grid(names, FITTED, searched, [heads[cases.index(case)] for case in searched], recall),
    ]


def fit_gpu(rows: Rows) -> list[str]:
    """Seconds of each run on a GPU, by sample."""
    samples = {"default": "65,536 vectors (the default)", "all": "all vectors"}
    lines = table("training sample", "first run, compilation included", "later runs", "distortion")
    for sample, name in samples.items():
        mine = needed(select(rows, sample=sample), sample)
        first = [row["seconds"] for row in mine if row["run"] == 0]
        later = needed([row["seconds"] for row in mine if row["run"] > 0], sample)
        began = f"{first[0]:.1f} s" if first else MISSING
        ended = f"{min(later):.1f} to {max(later):.1f} s"
        lines.append(line(name, began, ended, figures(mine[-1]["distortion"], 5)))
    return lines


def step(rows: Rows) -> list[str]:
    """The median time of a step, and how many times faster than Cayley's it is."""
    dims = sorted({row["n"] for row in rows})

    def cell(method: str, n: int) -> str:
        found = select(rows, method=method, n=n)
        if not found:
            return MISSING
        times = found[0]["times_faster_than_cayley"]
        return duration(found[0]["median_us"]) + (f" ({factor(times)})" if times else "")

    names = contenders(rows, "method", STEPS)
    needed([name for name in names if name in ("gcd-random", "cayley")], "Cayley")
    return grid(names, STEPS, dims, [f"n = {n}" for n in dims], cell)


def layer(rows: Rows) -> list[str]:
    """What a training step with the index costs, against none and a frozen rotation."""
    lines = table("", "the index", "against no index", "against a frozen rotation")
    places = {("cpu", "eager"): "CPU", ("cuda", "eager"): "H200, eager"}
    places |= {("cuda", "graph"): "H200, CUDA graph"}
    for (device, mode), place in places.items():
        mine = needed(select(rows, device=device, mode=mode), place)
        for name in unique(row["contender"] for row in mine):
            if name == "no index":
                continue
            runs = select(mine, contender=name)
            cells = (times([row[f"times_{base}"] for row in runs]) for base in BASES)
            lines.append(line(place, TOWERS.get(name, name), *cells))
    return lines


def nearest(rows: Rows) -> list[str]:
    """The nearest codewords: time and memory beside torch."""
    lines = table("a million vectors, 8 × 256 codewords", "time", "extra memory")
    for row in needed(select(rows, kernel="nearest"), "nearest"):
        lines.append(line(row["way"], f"{row['median_ms']:.1f} ms", f"{row['extra_MB']:,.0f} MB"))
    return lines


def pairings(rows: Rows) -> list[str]:
    """The time of a pairing, by the kind of matrix."""
    mine = [row for row in rows if row["kernel"] in ("greedy", "steepest")]
    cases = sorted({(row["kernel"], row["n"]) for row in mine})
    names = contenders(needed(mine, "pairings"), "matrix", {})

    def cell(matrix: str, case: tuple[str, int]) -> str:
        found = select(mine, matrix=matrix, kernel=case[0], n=case[1])
        return duration(found[0]["median_us"]) if found else MISSING

    return grid(names, {}, cases, [f"{kernel}, n = {n}" for kernel, n in cases], cell)


def drift(rows: Rows) -> list[str]:
    """How far R is from orthogonal after many steps."""
    lines = table("pairing", "n", "steps", "largest max\\|RᵀR − I\\|")
    for row in needed(rows, "drift"):
        worst = f"{row['worst_error']:.1e}"
        lines.append(line(row["pairing"], row["n"], f"{row['steps']:,}", worst))
    return lines


def recall_by_bytes(rows: Rows) -> list[str]:
    """recall@100 of one log by the bytes of a code, for the methods that have every size."""
    rows = select_start(rows)
    sizes = sorted({row["bytes"] for row in rows})
    names = [name for name in joint.METHODS if all(of(rows, name, size) for size in sizes)]
    needed([name for name in names if name == "post-hoc"], "post-hoc")
    ours = "gcd" if "gcd" in names else "gcd-greedy"

    def cell(name: str, size: int) -> str:
        return spread([joint.recall(row) for row in of(rows, name, size)])

    def p(_: str, size: int) -> str:
        both = ([joint.recall(r) for r in of(rows, m, size)] for m in (ours, "post-hoc"))
        return f"{joint.p_value(*both):.1g}"

    heads = [f"{size} bytes" for size in sizes]
    lines = grid(names, LABELS, sizes, heads, cell)
    lines += grid([f"{LABELS[ours]} against Faiss OPQ afterwards, p"], {}, sizes, heads, p)[2:]
    full = [row["results"]["full"]["recall@100"] for row in of(rows, "post-hoc", sizes[0])]
    return [*lines, line("full precision", *[spread(full)] * len(sizes))]


def recall_by_log(rows: Rows) -> list[str]:
    """recall@100 at 16 bytes and the distortion's change against a frozen rotation, by log."""
    rows = [row for row in select_start(rows) if row["bytes"] == 16]
    logs = [name for name in LOGS if select(rows, name=name)]
    needed(logs[len(LOGS) - 1 :], "one of the four logs")
    names = [name for name in joint.METHODS if select(rows, method=name)]

    def recall(method: str, log: str) -> str:
        return spread([joint.recall(row) for row in select(rows, method=method, name=log)])

    def distortion(method: str, log: str) -> str:
        mine, base = (
            statistics.mean(joint.distortion(row) for row in select(rows, method=m, name=log))
            for m in (method, "frozen")
        )
        return f"{100 * (mine / base - 1):+.1f} %"

    heads = [LOGS[log] for log in logs]
    trained = [name for name in names if name not in ("frozen", "post-hoc")]
    full = [
        spread([r["results"]["full"]["recall@100"] for r in select(rows, method=m, name=log)])
        for m, log in (("post-hoc", log) for log in logs)
    ]
    return [
        *("**recall@100, 16 bytes**", ""),
        *grid(names, LABELS, logs, heads, recall),
        line("full precision", *full),
        *("", "**Distortion of the trained index, against the frozen rotation**", ""),
        *grid(trained, LABELS, logs, heads, distortion),
    ]


def compare(result: dict[str, Any]) -> list[str]:
    """The advice of `givens compare`, and recall@10 of the best of each family."""
    rows = [row for row in needed(result["rows"], "compare") if row["form"] != "ivf"]
    sizes = sorted({row["budget"] for row in rows})

    def cell(family: str, size: int) -> str:
        mine = [row for row in select(rows, budget=size) if row["method"] in FAMILIES[family]]
        return percent(max(row["recall@10"] for row in mine)) if mine else MISSING

    names = [name for name in FAMILIES if any(row["method"] in FAMILIES[name] for row in rows)]
    quoted = [text for told in advice(result) for text in (f"> {told}", ">")][:-1]
    heads = [f"{size} bytes" for size in sizes]
    return [*quoted, "", *grid(names, {}, sizes, heads, cell)]


def tokens(rows: Rows) -> list[str]:
    """Distortion, collisions, perplexity and churn of semantic IDs."""
    lines = table("vectors, tokens", "", "distortion", "collisions", "perplexity", "churn")
    cases = unique((row["data"], row["tokens"], row["contender"]) for row in needed(rows, "tokens"))
    for data, count, name in cases:
        mine = select(rows, data=data, tokens=count, contender=name, seed=0)
        for row in mine:
            cells = (
                percent(row["distortion"] / row["norm"]),
                percent(row["colliding"], 2),
                f"{row['perplexity']:.0f}",
                percent(row["churn"]),
            )
            lines.append(line(f"{data}, {count}", name, *cells))
    return lines


def by_seed(by: str, *columns: str) -> Callable[[Rows], list[str]]:
    """Mean and standard deviation over seeds, one line for each value of `by`."""

    def told(rows: Rows) -> list[str]:
        def cell(name: Any, column: str) -> str:
            values = [row[column] for row in select(rows, **{by: name})]
            return (spread if column.startswith("recall") else plain)(needed(values, str(name)))

        return grid(unique(row[by] for row in needed(rows, by)), {}, columns, columns, cell)

    return told


def vectors(rows: Rows) -> list[str]:
    """The example of fixed vectors."""
    return by_seed("method", "recall@10", "distortion", "cpu seconds")(rows)


def towers(rows: Rows) -> list[str]:
    """The example of two towers."""
    return by_seed("index", "recall@100")(rows)


def damage(result: dict[str, Any]) -> list[str]:
    """Damaged files and interrupted writes, beside the peers."""
    rows = result["rows"]
    by_name = {row["target"]: row for row in rows if row["part"] == "mutations"}
    mine = [row for name, row in by_name.items() if name not in PEERS]
    sealed = needed([row for row in mine if row["digest"]], "sealed files")
    peers = [needed([by_name.get(name)], name)[0] for name in PEERS]
    versions = result["versions"]
    packages = ("faiss-cpu", "hnswlib", "usearch", "safetensors")
    names = ("Faiss", "hnswlib", "usearch", "safetensors")
    lines = table(
        "", "givens", *(f"{n} {versions[p]}" for n, p in zip(names, packages, strict=True))
    )
    ours = {key: sum(row[key] for row in sealed) for key in ("changed", "files")}
    lines.append(
        line(
            "damaged files that load with other contents",
            *(f"{row['changed']:,} of {row['files']:,}" for row in (ours, *peers)),
        )
    )
    crashed = sum(row["crashed"] for row in mine)
    cells = (f"{row['crashed']:,}" for row in peers)
    lines.append(line("damaged files that crash the process", f"{crashed:,}", *cells))
    kills = {row["target"]: row for row in rows if row["part"] == "kills"}
    disk = {row["target"]: row for row in rows if row["part"] == "full disk"}
    targets = ("givens save_index", "faiss.write_index", "", "", "plain safetensors")

    def killed(name: str) -> str:
        return f"{kills[name]['lost']} of {kills[name]['kills']:,}" if name in kills else MISSING

    def kept(name: str) -> str:
        return ("yes" if disk[name]["old_file_kept"] else "no") if name in disk else MISSING

    lines.append(line("old file lost, by kills while it is overwritten", *map(killed, targets)))
    lines.append(line("a full disk leaves the old file", *map(kept, targets)))

    def written(name: str) -> str:
        if name not in kills:
            return MISSING
        return f"{kills[name]['write_ms']:.0f} ms, {kills[name]['bytes'] / 1e6:.0f} MB"

    lines.append(line("time of a write", *map(written, targets)))
    others = [row for row in mine if not row["digest"]]
    return [
        *lines,
        "",
        f"The {ours['files']:,} files of givens carry digests: quantizers, indexes with their "
        f"records, folders of shards, checkpoints, states of fits. Another "
        f"{sum(row['files'] for row in others):,} files of {len(others)} kinds carry none: "
        f"vectors, click logs, run folders, rows of figures. There a changed number is a number, "
        f"and the promise is one line of error. Of all "
        f"{ours['files'] + sum(row['files'] for row in others):,}, "
        f"{sum(row['crashed'] + row['hung'] for row in mine)} crashed or hung, "
        f"{sum(row['over 2 s'] for row in mine)} took over 2 s, and "
        f"{sum(row['unclean'] for row in mine):,} ended in a traceback "
        f"({', '.join(row['target'] for row in mine if row['unclean']) or 'none'}).",
    ]


def stopped(result: dict[str, Any]) -> list[str]:
    """Whole commands stopped at random moments."""
    lines = table("command", "moments", "by signal", "results lost", "other result when run again",
                  "files left behind", "more than one line")  # fmt: skip
    for row in needed(select(result["rows"], part="stopped commands"), "stopped commands"):
        signals = ", ".join(f"{n} {s}" for s, n in row["answers"].items() if s != "ended before")
        ends = (row[key] for key in ("lost", "other end", "left behind", "not one line"))
        lines.append(line(f"`givens {row['command']}`", row["moments"], signals, *ends))
    return lines


def select_start(rows: Rows) -> Rows:
    """Rows of the common start, each log's of its latest version; others are of another table."""
    last: dict[str, int] = {}
    for row in rows:
        last[row["name"]] = max(last.get(row["name"], 1), row.get("version", 1))
    rows = [row for row in rows if row.get("version", 1) == last[row["name"]]]
    return [row for row in rows if row["config"]["start"] == "opq"]


def of(rows: Rows, method: str, size: int) -> Rows:
    """The rows of a method and a size of codes."""
    return select(rows, method=method, bytes=size)
