"""Tables of the pages on many vectors: measurements, their rates, and a plan computed from them."""

import math

from cells import Row, Rows, line, needed, percent, select, table, unique

ENGINES = {"local": "`--engine local`", "shards": "`--shards`", "ray": "`--engine ray`"}
ENGINE_NAMES = {"torchrec": "TorchRec", "dtensor": "DTensor", "givens": "`retrieval.tables`"}
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


def engines(rows: Rows) -> list[str]:
    """A step, what a rank sends and holds, and whether ranks agree with one process."""
    heads = ["engine", "items", "ranks", "a step", "sent by a rank", "memory of a rank"]
    lines = table(*heads, "largest difference of a loss from 1 rank")
    for row in needed(rows, "engines"):
        (alone,) = select(rows, engine=row["engine"], items=row["items"], ranks=1)
        apart = max(
            abs(a - b) / abs(b) for a, b in zip(row["losses"], alone["losses"], strict=True)
        )
        lines.append(
            line(
                ENGINE_NAMES[row["engine"]],
                f"{row['items']:,}",
                row["ranks"],
                f"{1e3 * row['seconds']:.0f} ms",
                f"{row['sent_bytes'] / 1e6:.2f} MB",
                f"{(row['peak_bytes'] - row['idle_bytes']) / 2**20:,.0f} MiB",
                "" if row["ranks"] == 1 else f"{apart:.0e}",
            )
        )
    return lines


def optimizers(rows: Rows) -> list[str]:
    """recall@100 by both optimizers of rows, each seed."""
    lines = table("optimizer", "numbers of a row", "recall@100, full precision", "index")
    for name in unique(row["optimizer"] for row in needed(rows, "optimizers")):
        mine = select(rows, optimizer=name)
        cells = (
            ", ".join(percent(row[key]) for row in mine) for key in ("recall_full", "recall_index")
        )
        lines.append(line(name, mine[0]["numbers_of_a_row"], *cells))
    return lines


def split(rows: Rows) -> list[str]:
    """The large run: what it took and what each rank held."""
    (row,) = needed(rows, "one run")
    tables = ", ".join(f"{size / 1e9:.2f}" for size in row["table_bytes"])
    peaks = ", ".join(f"{size / 1e9:.2f}" for size in row["peak_bytes"])
    return [
        *table("", f"{row['items'] / 1e6:.0f} million items × {row['dim']}, {row['ranks']} ranks"),
        line("tables of each rank", f"{tables} GB"),
        line("peak memory of each rank", f"{peaks} GB"),
        line("a step, towers alone", f"{row['step_seconds']:.2f} s"),
        line("a step, with the index", f"{row['joint_step_seconds']:.2f} s"),
        line("the whole run, with files and index", f"{row['seconds']:.0f} s"),
        line(
            "the index",
            f"{row['indexed']:,} items, {row['index_bytes'] / 1e6:.0f} MB; 100 queries in "
            f"{row['search_seconds']:.2f} s",
        ),
        line("its scores against exact search among decoded items", f"{row['agreement']:.0e}"),
        line(f"one process within {row['limit_bytes'] / 1e9:.1f} GB", f"`{row['refusal']}`"),
    ]


def split_plan(rows: Rows) -> list[str]:
    """GPUs, bytes, hours and price for large tables, by the bytes of an item of the large run."""
    (row,) = needed(rows, "one run")
    n, batch, history, times = 128, 65_536, 50, 20
    memory, network, price = 0.7 * 141e9, 25e9, 3.5
    # What was measured for 64 dimensions beside the tables, for each item of a rank.
    items = row["items"] / row["ranks"]
    beside = (max(row["peak_bytes"]) - row["idle_bytes"]) / items - 2 * 4 * row["dim"]
    lines = table("", "10⁸ items", "10⁹ items", "how it was computed")
    columns = []
    for V in (1e8, 1e9):
        bytes_of_all = V * (8 * n + 16)
        gpus = max(2, 1 << (math.ceil(bytes_of_all / memory) - 1).bit_length())
        share = (gpus - 1) / gpus
        drawn = batch * history * 0.7 / gpus
        sent = share * ((8 + 8 * n) * (drawn + 2 * batch / gpus) + 8 * 2 * batch * n)
        steps = times * V / batch
        touched = 3 * 8 * n * (drawn + 2 * batch / gpus)
        hours = steps * (sent / network + touched / 4e12) / 3600
        host = beside * V / gpus
        columns.append((bytes_of_all, gpus, host, sent, steps, hours, price * hours * gpus))
    small, large = columns
    told = (
        ("tables and their state", "{:.2f} TB", 1e-12, "V·(8·n + 16)"),
        ("GPUs, at least", "{:.0f}", 1, "0.7 · 141 GB each, a power of two"),
        (
            "beside them, of each rank",
            "{:.0f} GB",
            1e-9,
            f"{beside:.0f} bytes for each row, measured",
        ),
        ("a rank sends in a step, at most", "{:.0f} MB", 1e-6, "the table above"),
        ("steps", "{:,.0f}", 1, f"{times}·V / {batch:,}"),
        ("hours, at least", "{:.0f}", 1, "traffic alone"),
        ("GPU-hours in $", "{:,.0f}", 1, "assumed price"),
    )
    for at, (name, shown, unit, how) in enumerate(told):
        lines.append(
            line(name, shown.format(small[at] * unit), shown.format(large[at] * unit), how)
        )
    checkpoint = [2 * column[0] / 1e12 for column in columns]
    lines.append(
        line("a checkpoint and the best step", *(f"{c:.2f} TB" for c in checkpoint), "2 ×")
    )
    return lines


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
