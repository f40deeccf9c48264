"""`givens paper`: the figures and tables of the paper, one command each."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from givens.cli import output as out
from givens.storage import files

app = typer.Typer(
    name="paper", help="The paper's figures and tables: rows, pictures and what they show.",
    no_args_is_help=True,
)  # fmt: skip

Output = Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Data = Annotated[Path, typer.Option(help="Folder of the base vectors, as SIFT1M's.")]
Iterations = Annotated[int, typer.Option(help="Iterations of each run.")]
Smoke = Annotated[bool, typer.Option(help="A small run, to see that it works.")]

# A short joint run, for --smoke.
SMALL = {"dim": 16, "subspaces": 4, "codewords": 16, "batch": 128, "warmup": 20, "steps": 20}
SMALL |= {"every": 10, "iterations": 5}


@app.command()
def fig4(
    output: Output,
    device: Device = "cpu",
    dims: Annotated[str, typer.Option(help="Sizes n, comma-separated.")] = "",
    rows: Annotated[
        Path | None, typer.Option(help="Draw the picture from rows that were measured before.")
    ] = None,
    smoke: Smoke = False,
) -> None:
    """Time one step of GCD-R, GCD-G, GCD-S, Cayley and SVD against n.

    Example: givens paper fig4 --device cuda -o results
    """
    from givens.paper import fig4
    from givens.paper.rows import read, write

    pyplot = out.import_pyplot()
    measured = read(rows) if rows else []
    if rows and not (measured and all("median_us" in row for row in measured)):
        raise ValueError(f"{rows} holds no rows of fig4")
    place = measured[0]["device"] if measured else out.check_device(device).type
    sizes = _parse_sizes(dims) or ((16, 32) if smoke else fig4.DIMS[place])
    _prepare(output, (f"fig4-{place}.png", *([] if rows else [f"fig4-{place}.json"])), rows)
    if not measured:
        with out.progress("timing") as bar:
            bar.start(len(sizes) * len(fig4.METHODS))

            def tell(line: str) -> None:
                typer.echo(line)
                bar.advance()

            measured = fig4.run(place, sizes, tell=tell)
        write(output / f"fig4-{place}.json", measured)
    picture = output / f"fig4-{place}.png"
    fig4.plot(pyplot, measured, picture)
    for line in fig4.claims(measured):
        typer.echo(line)
    typer.echo(f"{picture}: look at it; the rows are beside it")


@app.command()
def fig2a(
    data: Data, output: Output, device: Device = "cpu", iterations: Iterations = 50,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show how OPQ, Cayley and every kind of GCD converge on fixed vectors.

    Example: givens paper fig2a --data sift -o results --device cuda
    """
    _fig2("a", data, output, device, iterations, smoke)


@app.command()
def fig2b(
    data: Data, output: Output, device: Device = "cpu", iterations: Iterations = 50,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show how much ten runs of OPQ differ, on 10 %, 30 % and all of the data.

    Example: givens paper fig2b --data sift -o results --device cuda
    """
    _fig2("b", data, output, device, iterations, smoke)


@app.command()
def fig2c(
    data: Data, output: Output, device: Device = "cpu", iterations: Iterations = 50,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show how much ten runs of GCD-G differ, on 10 %, 30 % and all of the data.

    Example: givens paper fig2c --data sift -o results --device cuda
    """
    _fig2("c", data, output, device, iterations, smoke)


def _fig2(part: str, data: Path, output: Path, device: str, iterations: int, smoke: bool) -> None:
    from givens.paper import fig2

    place = out.check_device(device).type
    if iterations < 1:
        raise ValueError(f"--iterations must be at least 1, but got {iterations}")
    pyplot = out.import_pyplot()
    x = fig2.read_base(data, place)
    if smoke:
        x, iterations = x[:5000], min(iterations, 3)
    _prepare(output, (f"fig2{part}.json", f"fig2{part}.png"), data)
    rows, picture = output / f"fig2{part}.json", output / f"fig2{part}.png"
    with out.progress("runs") as bar:
        # At most: a method's best rate may be the paper's.
        count = len(fig2.FRACTIONS) * fig2.RUNS
        bar.start((len(fig2.RATES) + 2) * (len(fig2.METHODS) - 1) + 2 if part == "a" else count)

        def tell(line: str) -> None:
            typer.echo(line)
            bar.advance()

        runs = fig2.Runs(rows, x, iterations, tell)
        if part == "a":
            fig2.run_a(runs)
        else:
            fig2.run_bc(runs, "opq" if part == "b" else "gcd-greedy")
    plot = fig2.plot_a if part == "a" else fig2.plot_bc
    for line in plot(pyplot, runs.rows, picture):
        typer.echo(line)
    typer.echo(f"{picture}: look at it; a rerun continues from {rows}")


Log = Annotated[
    Path | None,
    typer.Option("--data", help="Folder or file of a log; the built-in one if left out."),
]
Seeds = Annotated[int | None, typer.Option(help="Number of seeds for each method.")]
Steps = Annotated[int | None, typer.Option(help="Joint steps, with the index.")]
Methods = Annotated[str, typer.Option(help="Methods to compare, comma-separated; all if left out.")]
Warmup = Annotated[int | None, typer.Option(help="Warm-up steps, without the index.")]
Kind = Annotated[str, typer.Option("--size", help="small or medium (for CPUs), or large.")]
Bytes = Annotated[str, typer.Option(help="Bytes of a code, comma-separated.")]
Coarse = Annotated[int | None, typer.Option(help="Lists of an inverted file; none if left out.")]
Dim = Annotated[int | None, typer.Option(help="Dimension of the embeddings.")]
Angle = Annotated[
    float | None,
    typer.Option(
        help="One angle for every method, at the default rates; searched for if left out."
    ),
]


@app.command()
def fig3(
    output: Output, data: Log = None, device: Device = "cpu", seeds: Seeds = None,
    size: Kind = "large", methods: Methods = "", angle: Angle = None, dim: Dim = None,
    warmup: Warmup = None, steps: Steps = None, smoke: Smoke = False,
) -> None:  # fmt: skip
    """Draw the distortion of a trained index against the step, for every method.

    Each method has the angle that validation users choose on two seeds of their own.

    Example: givens paper fig3 --data ml-1m -o results --device cuda
    """
    from givens.paper import fig3
    from givens.paper.joint import Runs, log_for

    pyplot = out.import_pyplot()
    chosen = _choose_methods(methods, fig3.CURVES)
    if "frozen" not in chosen:
        raise ValueError("--methods must have frozen among them, which others are compared with")
    log = log_for(data, smoke=smoke, size=size)  # type: ignore[arg-type]
    options = {"dim": dim, "warmup": warmup, "steps": steps}
    configs = _configs(log, (fig3.BYTES,), 1 if seeds is None else seeds, smoke, size, **options)
    place = out.check_device(device).type
    joint, found, shown = (_name(kind, size, log) for kind in ("joint", "rates", "fig3"))
    _prepare(output, (f"{joint}.json", f"{found}.json", f"{shown}.png"), data)
    with out.progress("runs") as bar:
        bar.start(len(configs) * (len(chosen) + 1))
        tell = _make_teller(bar)
        runs = Runs(output / f"{joint}.json", place, tell)
        hidden = Runs(output / f"{found}.json", place, typer.echo)
        rates = _choose_rates(hidden, log, configs[:1], chosen, angle)
        rows = fig3.run(runs, log, configs, rates[configs[0].bytes])
    picture = output / f"{shown}.png"
    for line in fig3.plot(pyplot, rows, picture):
        typer.echo(line)
    typer.echo(f"{picture}: look at it; a rerun continues from {runs.path}")


@app.command()
def table1(
    output: Output, data: Log = None, device: Device = "cpu", seeds: Seeds = None,
    sizes: Bytes = "16", size: Kind = "large", coarse: Coarse = None, methods: Methods = "",
    angle: Angle = None, dim: Dim = None, warmup: Warmup = None, steps: Steps = None,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Compare what users find in indexes trained by every method, over several seeds.

    Each method has the rates that validation users choose on two seeds of their own. Five seeds are
    shown, and ten of methods whose p-value leaves it open whether they differ from the baseline.

    Example: givens paper table1 --data ml-1m -o results --device cuda --sizes 8,16,32
    """
    from givens.paper import table1
    from givens.paper.joint import METHODS, MORE, SEEDS, Runs, log_for, p_value, select_comparable

    # Fail before the work if a package is missing.
    p_value([0.0, 1.0], [1.0, 2.0])
    log = log_for(data, smoke=smoke, size=size)  # type: ignore[arg-type]
    bytes_of_codes = _parse_sizes(sizes, "--sizes")
    chosen = _choose_methods(methods, METHODS)
    count = (2 if smoke else SEEDS) if seeds is None else seeds
    options = {"dim": dim, "coarse": coarse, "warmup": warmup, "steps": steps}
    configs = _configs(log, bytes_of_codes, count, smoke, size, **options)
    place = out.check_device(device).type
    joint, found, table = (_name(kind, size, log) for kind in ("joint", "rates", "table1"))
    table += f"-coarse-{coarse}.md" if coarse else ".md"
    _prepare(output, (f"{joint}.json", f"{found}.json", table), data)
    with out.progress("runs") as bar:
        # With a warm-up of each seed.
        bar.start(len(configs) * len(chosen) + count)
        tell = _make_teller(bar)
        hidden = Runs(output / f"{found}.json", place, typer.echo)
        first = [config for config in configs if config.seed == configs[0].seed]
        rates = _choose_rates(hidden, log, first, chosen, angle)
        runs = Runs(output / f"{joint}.json", place, tell)
        more = 0 if smoke or seeds is not None else MORE
        table1.run(runs, log, configs, rates, more=more)
    written = output / table
    # Including the rows of earlier runs, with other sizes and methods.
    lines = table1.table(select_comparable(runs.rows, log, configs[0]), log)
    with files.replacing(written) as temporary:
        temporary.write_text("\n".join(lines) + "\n", "utf-8")
    for line in lines:
        typer.echo(line)
    typer.echo(f"Written: {written}; a rerun continues from {runs.path}")


@app.command()
def when(
    output: Output, data: Log = None, device: Device = "cpu", seeds: Seeds = None,
    sizes: Bytes = "8", size: Kind = "small", angle: Angle = None, dim: Dim = None,
    warmup: Warmup = None, steps: Steps = None, smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show when learning the rotation pays: by its start, fixed items, a drifting log and bytes.

    Example: givens paper when -o results --device cuda --size large --sizes 8,16,32
    """
    from givens.paper import when
    from givens.paper.joint import SEEDS, Runs

    pyplot = out.import_pyplot()
    made = when.open_logs(data, smoke=smoke)
    count = (2 if smoke else SEEDS) if seeds is None else seeds
    options = {"dim": dim, "warmup": warmup, "steps": steps}
    log = made[when.KINDS[0]]
    configs = _configs(log, _parse_sizes(sizes, "--sizes"), count, smoke, size, **options)
    place = out.check_device(device).type
    name, found = (_name(kind, size, log if data else None) for kind in ("when", "rates-when"))
    _prepare(output, (f"{name}.json", f"{name}.png", f"{found}.json"), data)
    with out.progress("runs") as bar:
        bar.start(len(configs) * len(made) * 4 * len(when.STARTS) + count * len(made))
        tell = _make_teller(bar)
        hidden = Runs(output / f"{found}.json", place, typer.echo)
        runs = Runs(output / f"{name}.json", place, tell)
        rows = when.run(runs, hidden, made, configs, angle)
    picture = output / f"{name}.png"
    for line in when.plot(pyplot, rows, picture):
        typer.echo(line)
    typer.echo(f"{picture}: look at it; a rerun continues from {runs.path}")


@app.command()
def stream(
    output: Output, data: Log = None, device: Device = "cpu", seeds: Seeds = None,
    subspaces: Annotated[int, typer.Option(help="Bytes of a code.")] = 8, size: Kind = "small",
    every: Annotated[int, typer.Option(help="Steps between refreshes.")] = 100,
    angle: Angle = None, dim: Dim = None, warmup: Warmup = None, steps: Steps = None,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Refresh an index while its log moves on: recall, codes rewritten and time.

    Example: givens paper stream -o results --device cuda --size large
    """
    from givens.paper import stream
    from givens.paper.joint import SEEDS, Runs

    pyplot = out.import_pyplot()
    log = stream.log_for(data, smoke=smoke)
    count = (2 if smoke else SEEDS) if seeds is None else seeds
    options = {"dim": dim, "warmup": warmup, "steps": steps}
    made = _configs(log, (subspaces,), count, smoke, size, every=5 if smoke else every, **options)
    configs = [stream.configure(config) for config in made]
    place = out.check_device(device).type
    name, found = (_name(kind, size, log if data else None) for kind in ("stream", "rates-stream"))
    _prepare(output, (f"{name}.json", f"{name}.png", f"{name}.md", f"{found}.json"), data)
    with out.progress("runs") as bar:
        bar.start(len(configs) * (len(stream.WAYS) + 1))
        hidden = Runs(output / f"{found}.json", place, typer.echo)
        runs = Runs(output / f"{name}.json", place, _make_teller(bar))
        rows = stream.run(runs, hidden, log, configs, angle)
    picture, written = output / f"{name}.png", output / f"{name}.md"
    lines = stream.plot(pyplot, rows, picture)
    with files.replacing(written) as temporary:
        temporary.write_text("\n".join(lines) + "\n", "utf-8")
    for line in lines:
        typer.echo(line)
    typer.echo(f"{picture}: look at it; a rerun continues from {runs.path}")


def _choose_rates(
    hidden: Any, log: Any, configs: list[Any], methods: tuple[str, ...], angle: float | None
) -> dict[int, Any]:
    """The rates of each method by size: as they are given, or found on hidden seeds."""
    from givens.paper import rates

    if angle is not None:
        given = {c.bytes: {**rates.read_rates(c), "angle": angle} for c in configs}
        return {size: dict.fromkeys(methods, found) for size, found in given.items()}
    chosen = {c.bytes: rates.choose(hidden, log, c, methods) for c in configs}
    for size, found in chosen.items():
        for line in (f"Rates at {size} bytes, by the validation users:", *rates.describe(found)):
            typer.echo(line)
    return chosen


def _name(kind: str, size: str, log: Any) -> str:
    """Of a file, by its log unless that is the built-in one; a small run says so first."""
    from givens.paper.joint import slug

    parts = ([] if size == "large" else [size], [kind], [slug(log.name)] if log else [])
    return "-".join(part for some in parts for part in some)


def _prepare(output: Path, names: tuple[str, ...], source: Path | None = None) -> None:
    """Create the folder of results, after checking that they can be written and are not inputs."""
    inside = source.iterdir() if source is not None and source.is_dir() else ()
    out.check_folder(output, names, [source, *inside])
    with out.folder(output):
        files.check_writable(output / names[0])


def _configs(
    log: Any, sizes: tuple[int, ...], seeds: int, smoke: bool, size: str, **options: int | None
) -> list[Any]:
    """A configuration for each seed and number of bytes, with the same rates."""
    from givens.retrieval.config import config_for

    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, but got {seeds}")
    if log.words is not None:
        # A log of searches describes its users by words, not by their history.
        options["history"] = 0
    if smoke:
        options |= {name: value for name, value in SMALL.items() if options.get(name) is None}
        sizes = tuple(min(number, SMALL["subspaces"]) for number in sizes)
    chosen: dict[str, Any] = {name: options[name] for name in options if name != "subspaces"}
    # The approximate steepest pairing, as in figure 4: on a GPU it does not synchronise.
    chosen["exact"] = False
    return [
        config_for(log, size=size, **chosen, subspaces=number, seed=seed)  # type: ignore[arg-type]
        for seed in range(seeds)
        for number in dict.fromkeys(sizes)
    ]


def _choose_methods(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    chosen = tuple(text.split(",")) if text else known
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--methods must be of {', '.join(known)}, but got {unknown[0]!r}")
    return chosen


def _make_teller(bar: out.Bar) -> Callable[[str], None]:
    def tell(line: str) -> None:
        typer.echo(line)
        bar.advance()

    return tell


def _parse_sizes(text: str, name: str = "--dims") -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        sizes = (0,)
    if any(n < 2 for n in sizes):
        raise ValueError(
            f"{name} must be comma-separated numbers, each at least 2, but got {text!r}"
        )
    return sizes
