"""Tables of the pages on many vectors: measurements, their rates, and a plan computed from them."""

from cells import Row, Rows, line, needed, select, table

ENGINES = {"local": "`--engine local`", "shards": "`--shards`", "ray": "`--engine ray`"}
# Lists that a query looks into, in the benchmark and in the plan.
NPROBE = 16


def scale(rows: Rows) -> list[str]:
    """Seconds and memory of each command."""
    lines = table("step", "seconds", "of which", "memory of all processes")
    for row in needed(rows, "scale"):
        parts = row.get("parts") or {}
        if "search_seconds" in row:
            parts = {"search": row["search_seconds"]}
        told = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts.items())
        peaks = row["peak_of"] if len(row["peak_of"]) > 1 else {}
        each = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in peaks.items())
        memory = f"{row['peak_bytes'] / 2**20:,.0f} MiB" + (f": {each}" if each else "")
        lines.append(line(_step_name(row), f"{row['seconds']:.3g}", told, memory))
    return lines


class Rates:
    """What a million vectors and a query took, in seconds of one core, and what a worker held."""

    def __init__(self, rows: Rows) -> None:
        shards, build, search = (
            needed(select(rows, **labels), str(labels))[0]
            for labels in (
                {"engine": "shards"},
                {"engine": "ray"},
                {"step": "search", "index": "local.faiss"},
            )
        )
        self.n, self.lists, self.cores = build["dim"], build["coarse"], build["cores"]
        self.size = build["subspaces"] + 8
        millions = build["vectors"] / 1e6
        self.encode = shards["parts"]["encode"] * self.cores / millions
        self.merge = build["parts"]["merge"] / millions
        self.query = search["search_seconds"] * search["threads"] / search["queries"]
        self.scored = build["vectors"] * NPROBE / self.lists
        self.worker = build["peak_of"]["workers"] / self.cores


def scale_rates(rows: Rows) -> list[str]:
    """For a million vectors and a core, and how it grows."""
    rates = Rates(rows)
    return [
        *table("", "measured", "grows with"),
        line(
            "encode",
            f"{rates.encode:.0f} s",
            "N · n · (L + 256): each vector is compared with all L centroids",
        ),
        line(
            "merge",
            f"{rates.merge:.2f} s, {rates.size:.0f} MB",
            "N · (b + 8), at the speed of the disk",
        ),
        line(
            "a query",
            f"{1e3 * rates.query:.1f} ms of a core",
            "N · nprobe / L vectors are scored, and L centroids",
        ),
        line("memory of a worker", f"{rates.worker / 2**20:.0f} MiB", "n · L; not N"),
        line("an index", f"{rates.size:.0f} MB", "N · (b + 8)"),
    ]


def scale_plan(rows: Rows) -> list[str]:
    """A billion vectors by the measured rates."""
    rates, count, lists = Rates(rows), 1e9, 65_536
    n, size = rates.n, rates.size
    encode = rates.encode * count / 1e6 * (lists + 256) / (rates.lists + 256) / 3600
    fit = 10 * 64 * lists * 2 * n * lists
    scored = count * NPROBE / lists
    merge = count * size / 1e8 / 60
    worker = (rates.worker + 4 * n * (lists - rates.lists)) / 2**20
    read = count / lists * size / 1e3
    return [
        *table("step", "what", "how it was computed"),
        line("vectors", f"{4 * n * count / 1e9:.0f} GB of float32", "4·n·N"),
        line(
            "fit",
            f"{fit:.0e} operations: {fit / 1e11 / 3600:.1f} hours at 100 Gflop/s",
            "10 passes of k-means over 64·L vectors, 2·n·L operations each",
        ),
        line(
            "encode",
            f"{encode:.0f} core-hours: {encode / 64:.1f} hours on 64 cores",
            f"{rates.encode:.0f} s · 1,000 · (65,536 + 256)/({rates.lists:,} + 256)",
        ),
        line(
            "merge",
            f"{count * size / 1e9:.0f} GB: {merge:.0f} minutes at 100 MB/s each way",
            "N · (b + 8)",
        ),
        line("index", f"{count * size / 1e9:.0f} GB on disk", "N · (b + 8)"),
        line(
            "a worker",
            f"{worker:.0f} MiB, and Faiss's scores",
            "measured, and 4·n for each further list",
        ),
        line(
            f"a query with {NPROBE} lists",
            f"{scored:,.0f} vectors scored: {1e3 * rates.query * scored / rates.scored:.0f} ms of "
            f"a core, and {NPROBE} reads of {read:.0f} kB",
            f"N · nprobe / L against {rates.scored:,.0f} in {1e3 * rates.query:.1f} ms",
        ),
        line("machines", "four of 16 cores, and 500 GB of shared disk", "vectors, shards, index"),
        line("price", f"{0.04 * encode:.0f} $ of core-hours, and the disk for a day", "assumed"),
    ]


def _step_name(row: Row) -> str:
    if row["step"] == "build":
        return f"build, {ENGINES[row['engine']]}"
    if row["step"] == "search":
        name = f"search, {row['queries']:,} queries"
        if row["index"].startswith("shards"):
            return f"{name}, shards"
        return f"{name}, `--mmap`" if row["mapped"] else name
    return str(row["step"])


def scale_log(rows: Rows) -> list[str]:
    """A log that is streamed: seconds and memory."""
    parts = {row["part"]: row for row in needed(rows, "scale_log")}
    first, again, train = parts["read"], parts["again"], parts["train"]
    gib = 2**30
    return [
        *table("", "first run", "with the pass kept"),
        line("imports", f"{first['imported']:.1f} s", f"{again['imported']:.1f} s"),
        line("the pass", f"{first['read']:.1f} s", f"{again['read']:.1f} s"),
        line("windows of all 16 streams", f"{_windows(first):.1f} s", f"{_windows(again):.1f} s"),
        line(
            "to the first batch", f"{first['first_batch']:.1f} s", f"{again['first_batch']:.1f} s"
        ),
        line("to the first step, with towers of 8 dimensions", f"{train['first_step']:.1f} s", ""),
        line("a batch of 4,096", f"{first['draw_ms']:.1f} ms", f"{again['draw_ms']:.1f} ms"),
        line("a step beside it", f"{train['step_ms']:.0f} ms", ""),
        line(
            "peak memory, without a model",
            f"{first['peak_bytes'] / gib:.2f} GiB",
            f"{again['peak_bytes'] / gib:.2f} GiB",
        ),
        line(
            "of it Python and packages",
            f"{first['base_bytes'] / gib:.2f} GiB",
            f"{again['base_bytes'] / gib:.2f} GiB",
        ),
        line(
            "peak memory with the model, beyond its tables",
            f"{train['beyond_tables'] / gib:.2f} GiB",
            "",
        ),
    ]


def _windows(row: Row) -> float:
    return float(row["opened"] + row["windows"])
