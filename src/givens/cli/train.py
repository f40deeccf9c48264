"""`givens train`: towers and index from a click log."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from givens import distributed
from givens.checks import check_number
from givens.cli import output as out
from givens.retrieval.config import Config, Method, Start, config_for
from givens.retrieval.data import Log
from givens.storage import files

METHODS = get_args(Method)
# Of a run's folder, beside its checkpoint.
WRITTEN = (
    "config.json",
    "index.faiss",
    "index.faiss.json",
    "items.txt",
    "metrics.jsonl",
    "quantizer.safetensors",
    "results.json",
    "start.safetensors",
    "towers.safetensors",
    "users.safetensors",
)


def train(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the run.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder or file of a log; the built-in one if not given.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"How R is learned: {', '.join(METHODS)}.")] = "gcd",
    start: Annotated[
        str, typer.Option(help=f"Where R starts: {', '.join(get_args(Start))}.")
    ] = "opq",
    exact: Annotated[bool, typer.Option(help="Whether gcd-steepest is exactly that.")] = False,
    dim: Annotated[int | None, typer.Option(help="Of the embeddings; 512, or 64 built-in.")] = None,
    subspaces: Annotated[
        int | None, typer.Option(help="Bytes of a code; 32, or 8 built-in.")
    ] = None,
    codewords: Annotated[int, typer.Option(help="Codewords of each subspace, 2 to 256.")] = 256,
    coarse: Annotated[int, typer.Option(help="Lists of an inverted file; 0 for none.")] = 0,
    warmup: Annotated[int | None, typer.Option(help="Steps without the index.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps with it.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples of a step, of all ranks.")] = None,
    history: Annotated[int | None, typer.Option(help="Items the user tower looks back at.")] = None,
    pool: Annotated[str, typer.Option(help="Of the history: mean or attention.")] = "attention",
    loss: Annotated[str, typer.Option(help="softmax or hinge.")] = "softmax",
    negatives: Annotated[
        int | None, typer.Option(help="Drawn items a batch shares; all items where they are few.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Rate of the towers without the index.")] = None,
    joint_lr: Annotated[
        float | None, typer.Option(help="Rate of towers and codebooks with the index.")
    ] = None,
    angle: Annotated[float | None, typer.Option(help="How far R turns in a step, about.")] = None,
    weight: Annotated[float | None, typer.Option(help="Of the distortion in the loss.")] = None,
    every: Annotated[int, typer.Option(help="Steps between looks at validation users.")] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run was stopped.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Train two towers, codebooks and the rotation together, and build their index.

    Reads MovieLens (ratings.dat, ratings.csv), Amazon's reviews (.json, .json.gz), rows of
    "user item time" and lines of "user item item …". Writes into the folder: config.json,
    metrics.jsonl, towers.safetensors, quantizer.safetensors, index.faiss, items.txt, whose lines
    are what the index's ids 0, 1, … are called in the data, and results.json.

    Under torchrun its processes train one model together, on a GPU each with --device cuda.

    Example: givens train -o run --data ml-1m --device cuda

    Example: torchrun --nproc-per-node 8 -m givens train -o run --data ml-1m --device cuda
    """
    _train(
        output,
        data,
        resume=resume,
        device=device,
        method=method,
        start=start,
        exact=exact,
        dim=dim,
        subspaces=subspaces,
        codewords=codewords,
        coarse=coarse,
        warmup=warmup,
        steps=steps,
        batch=batch,
        history=history,
        pool=pool,
        loss=loss,
        negatives=negatives,
        lr=lr,
        joint_lr=joint_lr,
        angle=angle,
        weight=weight,
        every=every,
        seed=seed,
    )
    distributed.leave()


def _train(output: Path, data: Path | None, *, resume: bool, device: str, **options: Any) -> None:
    """The command, by one process or as one rank of several."""
    from givens.retrieval.data import click_log
    from givens.retrieval.readers import read
    from givens.retrieval.train import CHECKPOINT
    from givens.retrieval.train import train as trained

    began = time.perf_counter()
    place = distributed.join(out.check_device(device))
    if (output / CHECKPOINT).exists() and not resume:
        raise ValueError(f"{output} holds a run; go on with --resume, or choose another folder")
    log = click_log() if data is None else read(data)
    config = config_for(log, small=data is None, **options)
    config.check(log)
    if not distributed.is_first():
        trained(log, config, output, resume=resume, device=place)
        return
    inside = data.iterdir() if data is not None and data.is_dir() else ()
    out.check_folder(output, (*WRITTEN, CHECKPOINT), [data, *inside])
    typer.echo(log)
    # A run that goes on keeps its own record, whose options were the same or are refused below.
    record = output / "config.json"
    about = {**run_record(config, log, device, data), "seconds": 0.0}
    if (output / CHECKPOINT).exists() and record.exists():
        about = _earlier(record)
    before = about.get("seconds")

    def write_record() -> None:
        """The seconds of all parts of the run, up to now; none where those of one are not known."""
        if before is not None:
            about["seconds"] = before + time.perf_counter() - began
        files.write_json(record, about)

    with out.folder(output):
        write_record()
    with out.progress("warm-up") as bar:

        def tell(row: dict[str, Any]) -> None:
            write_record()
            bar.stand(row["step"], config.total, _note(row))

        done = trained(log, config, output, resume=resume, device=place, tell=tell)
    for line in _told(config, done.results):
        typer.echo(line)
    write_record()
    spent = time.perf_counter() - began
    index = output / "index.faiss"
    typer.echo(
        f"Written in {spent:.0f} s: {output}/ (config.json, metrics.jsonl, results.json, "
        f"towers.safetensors, quantizer.safetensors, {'' if data is None else 'items.txt, '}"
        f"index.faiss of {out.size(index)})\n"
        f"Next: {out.command('givens', 'report', output, '-o', 'report.html')}, "
        f"{out.command('tensorboard', '--logdir', output)}"
    )


def _earlier(path: Path) -> dict[str, Any]:
    """The record of a run that goes on."""
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
    """How a run comes about, for its config.json."""
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "seed"}
    if not distributed.alone():
        options["ranks"] = distributed.count()
    about = out.record(config.seed, device, data=data and str(data), **options)
    return {**about, "log": str(log)}


def _note(row: dict[str, Any]) -> str:
    note = f"{row['phase']}: validation recall {100 * row['recall']:.1f} %"
    return f"{note}, distortion {row['distortion']:.4f}" if "distortion" in row else note


def _told(config: Config, results: dict[str, Any]) -> list[str]:
    """The results of the test users, a line for each way to search."""
    names = {
        "full": "full precision",
        "index": f"index, {config.bytes} bytes",
        "popularity": "popularity",
    }
    lines = []
    for kind, name in names.items():
        told = (f"{metric} {100 * value:.2f} %" for metric, value in results[kind].items())
        kept = [line for line in told if line.split("@")[1].startswith(("100 ", "10 "))]
        lines.append(f"{name:>18}: {', '.join(kept)}")
    lines.append(f"Distortion {results['distortion']:.4f}; best step {results['best_step']:,}")
    return lines
