"""`givens train`: towers and index from a click log."""

import dataclasses
import inspect
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import torch
import typer

from givens import distributed
from givens.checks import check_number
from givens.cli import output as out
from givens.retrieval.config import SIZES, Config, Size, config_for
from givens.retrieval.data import MIN_ITEMS, MIN_RATING, Log
from givens.storage import files

# The files in a run's folder, in addition to its checkpoint.
WRITTEN = (
    "config.json",
    "index.faiss",
    "index.faiss.json",
    "items.txt",
    "log.safetensors",
    "metrics.jsonl",
    "quantizer.safetensors",
    "results.json",
    "start.safetensors",
    "towers.safetensors",
    "users.safetensors",
)


# Steps of a phase before its timing, while code is compiled, and steps that are timed.
SETTLE, TIMED = 5, 20
# Fields of `Config` whose defaults depend on the size.
SIZED = {name for options in SIZES.values() for name in options} | {"batch", "every"}


def _add_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the fields of `Config` as options, in place of its `**options`."""
    signature = inspect.signature(command)
    ours = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    fields = [_make_option(one) for one in dataclasses.fields(Config)]
    parameters = signature.replace(parameters=[*ours, *fields])
    command.__signature__ = parameters  # type: ignore[attr-defined]
    return command


def _make_option(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind, told = get_args(field.type)
    sized = field.name in SIZED
    if get_origin(kind) is Literal:
        kind = str
    if sized or field.default is None:
        # None means the default of the size.
        kind = kind | None
    shown = typer.Option(
        f"--{field.name.replace('_', '-')}",
        help=told.text,
        rich_help_panel=told.panel,
        show_default="by --size" if sized else True,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if sized else field.default,
        annotation=Annotated[kind, shown],
    )


@_add_options
def train(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder or file of a log; the built-in one if not given.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="small: 64 dimensions, 8 bytes an item, 1,200 steps; medium: 128, 16 bytes, "
            "3,000 steps; large: 512, 32 bytes, 3,000 steps or more, for a GPU. By default small "
            "for the built-in log, large for --data. "
            "The time is told after the first steps."
        ),
    ] = None,
    min_rating: Annotated[
        float, typer.Option(help="Lower ratings of --data are left out.")
    ] = MIN_RATING,
    min_items: Annotated[
        int, typer.Option(help="Users of --data with fewer items than this are left out.")
    ] = MIN_ITEMS,
    hash_items: Annotated[
        int | None,
        typer.Option(
            help="Rows that the items of Parquet files share by a hash; by default each item has "
            "its own."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue a run that was stopped, with the same options."),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    **options: Any,
) -> None:
    """Train two towers, codebooks and the rotation together, and build their index.

    Reads MovieLens (ratings.dat, ratings.csv), Amazon's reviews (.json, .json.gz), rows of
    "user item time", lines of "user item item …", and folders of Parquet files with the columns
    user, item and, if there are any, rating and time. These are streamed and may be larger than
    memory; how they are read is kept in log.safetensors. Ratings of 4 and more count, and users
    with at least 10 of them; --min-rating and --min-items change that. Writes into the folder:
    config.json, metrics.jsonl, towers.safetensors, quantizer.safetensors, index.faiss, items.txt,
    whose lines are what the index's ids 0, 1, … are called in the data, and results.json.

    Under torchrun its processes train one model together, on a GPU each with --device cuda.

    Example: givens train -o run --data ml-1m --device cuda

    Example: givens train -o run --data clicks.csv --size small --min-items 5

    Example: givens train -o run --data clicks/ --size medium

    Example: torchrun --nproc-per-node 8 -m givens train -o run --data ml-1m --device cuda
    """
    rules = {"min_rating": min_rating, "min_items": min_items, "hash_items": hash_items}
    _train(output, data, size, rules, resume, device, options)
    distributed.leave()


def _train(
    output: Path,
    data: Path | None,
    size: str | None,
    rules: dict[str, Any],
    resume: bool,
    device: str,
    options: dict[str, Any],
) -> None:
    """Run the command, as one process or as one rank of several."""
    from givens.retrieval.data import click_log
    from givens.retrieval.readers import is_parquet, read
    from givens.retrieval.train import CHECKPOINT
    from givens.retrieval.train import train as train_towers

    began = time.perf_counter()
    place = distributed.join(out.check_device(device))
    if (output / CHECKPOINT).exists() and not resume:
        raise ValueError(f"{output} holds a run; go on with --resume, or choose another folder")
    chosen = cast(Size, size or ("small" if data is None else "large"))
    # Before the log is read, which may take long.
    early = config_for(None, size=chosen, **options)
    if data is not None and data.exists():
        early.check_order(data.name, streamed=is_parquet(data))
    inside = data.iterdir() if data is not None and data.is_dir() else ()
    out.check_folder(output, (*WRITTEN, CHECKPOINT), [data, *inside])
    if data is None:
        if rules != {"min_rating": MIN_RATING, "min_items": MIN_ITEMS, "hash_items": None}:
            raise ValueError("--min-rating, --min-items and --hash-items go with --data")
        log = click_log()
    elif distributed.is_first():
        with out.progress("reading the log") as bar:

            def show(done: int, total: int) -> None:
                bar.stand(done, total, "reading the log")

            log = read(data, **rules, folder=output, tell=typer.echo, progress=show)
    else:
        log = read(data, **rules, folder=output)
    config = config_for(log, size=chosen, **options)
    config.check(log)
    if not distributed.is_first():
        train_towers(log, config, output, resume=resume, device=place)
        return
    typer.echo(log)
    if log.selection is not None and log.selection.drops:
        typer.echo(f"Left out: {log.selection} (--min-items, --min-rating)")
    # A resumed run keeps its record; options that differ from it raise below.
    record = output / "config.json"
    about = {**run_record(config, log, device, data), "seconds": 0.0}
    if (output / CHECKPOINT).exists() and record.exists():
        about = _read_record(record)
    before = about.get("seconds")

    def write_record() -> None:
        """Write the record; `seconds` sums all parts of the run, and is None if one is unknown."""
        if before is not None:
            about["seconds"] = before + time.perf_counter() - began
        files.write_json(record, about)

    with out.folder(output):
        write_record()
    with out.progress("warm-up") as bar:
        clock = Clock(bar, config, place)

        def tell(row: dict[str, Any]) -> None:
            write_record()
            clock.note = _describe_row(row)
            clock.show(row["step"])

        done = train_towers(
            log, config, output, resume=resume, device=place, tell=tell, progress=clock.count
        )
    for line in _describe_results(config, done.results):
        typer.echo(line)
    write_record()
    spent = time.perf_counter() - began
    index = output / "index.faiss"
    typer.echo(
        f"Written in {spent:.0f} s: {output}/ (config.json, metrics.jsonl, results.json, "
        f"towers.safetensors, quantizer.safetensors, {'' if log.names is None else 'items.txt, '}"
        f"index.faiss of {out.format_size(index)})\n"
        f"Next: {out.quote_command('givens', 'report', output, '-o', 'report.html')}, "
        f"{out.quote_command('tensorboard', '--logdir', output)}"
    )


class Clock:
    """Shows the progress of a run, and after the first steps of a phase its expected time."""

    def __init__(self, bar: out.Bar, config: Config, device: torch.device) -> None:
        self.bar, self.config, self.device = bar, config, device
        self.note = "warm-up"
        self.first: int | None = None
        self.began = 0.0

    def show(self, step: int) -> None:
        """Show a step on the progress bar."""
        self.bar.stand(step, self.config.total, self.note)

    def count(self, step: int) -> None:
        """Count a step."""
        self.show(step)
        c = self.config
        if self.first is None or step == c.warmup + 1:
            self.first = step
        if step == self.first + SETTLE:
            self.began = self._read()
        elif step == self.first + SETTLE + TIMED:
            each = (self._read() - self.began) / TIMED
            end, name = (c.warmup, "Warm-up") if step <= c.warmup else (c.total, "With the index")
            where = self.device.type
            if where == "cpu":
                where = f"CPU, threads: {torch.get_num_threads()}"
            typer.echo(
                f"{name}: about {_describe_seconds(each * (end - step))} for the remaining "
                f"{end - step:,} steps ({1000 * each:.0f} ms each, {where})"
            )

    def _read(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _describe_seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _read_record(path: Path) -> dict[str, Any]:
    """Read the record of a run that is resumed."""
    try:
        about: dict[str, Any] = dict(json.loads(path.read_text("utf-8")))
        if about.get("seconds") is not None:
            check_number("seconds", about["seconds"], 0)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged: it is not what `givens train` writes; remove it to go on without"
        ) from error
    return about


def run_record(config: Config, log: Log, device: str, data: Path | None) -> dict[str, Any]:
    """The record of a run, for its config.json."""
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "seed"}
    if not distributed.is_alone():
        options["ranks"] = distributed.count()
    about = out.make_record(config.seed, device, data=data and str(data), **log.rules, **options)
    if log.selection is not None:
        about["selection"] = dataclasses.asdict(log.selection)
    return {**about, "log": str(log)}


def _describe_row(row: dict[str, Any]) -> str:
    note = f"{row['phase']}: validation recall {100 * row['recall']:.1f} %"
    return f"{note}, distortion {row['distortion']:.4f}" if "distortion" in row else note


def _describe_results(config: Config, results: dict[str, Any]) -> list[str]:
    """The test users' recall, a line for each way to search, after a warning if it is too low."""
    names = {
        "full": "full precision",
        "index": f"index, {config.bytes} bytes",
        "popularity": "popularity",
    }
    lines = []
    k = max(int(name[7:]) for name in results["index"] if name.startswith("recall@"))
    found, popular = (100 * results[by][f"recall@{k}"] for by in ("index", "popularity"))
    if found < popular:
        lines.append(
            f"Warning: recall@{k} of the index, {found:.2f} %, is below that of popularity alone, "
            f"{popular:.2f} %: the towers have learned too little to be of use. Train longer "
            "(--warmup, --steps), take a larger --size, or keep more of the log (--min-items)."
        )
    for kind, name in names.items():
        values = (f"{metric} {100 * value:.2f} %" for metric, value in results[kind].items())
        kept = [value for value in values if value.split("@")[1].startswith(("100 ", "10 "))]
        lines.append(f"{name:>18}: {', '.join(kept)}")
    lines.append(f"Distortion {results['distortion']:.4f}; best step {results['best_step']:,}")
    return lines
