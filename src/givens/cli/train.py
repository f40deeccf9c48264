"""`givens train`: towers and index from a click log."""

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from givens import distributed
from givens.cli import output as out
from givens.retrieval.config import Config, Method, Start, suited
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
    config = suited(log, small=data is None, **options)
    config.check(log)
    if not distributed.is_first():
        trained(log, config, output, resume=resume, device=place)
        return
    inside = data.iterdir() if data is not None and data.is_dir() else ()
    out.check_folder(output, (*WRITTEN, CHECKPOINT), [data, *inside])
    typer.echo(log)
    # A run that goes on keeps its own record, whose options were the same or are refused below.
    fresh = not (output / CHECKPOINT).exists()
    about = run_record(config, log, device, data)
    with out.folder(output):
        if fresh:
            files.write_json(output / "config.json", about)
    with out.progress("warm-up") as bar:

        def tell(row: dict[str, Any]) -> None:
            bar.stand(row["step"], config.total, _note(row))

        done = trained(log, config, output, resume=resume, device=place, tell=tell)
    for line in _told(config, done.results):
        typer.echo(line)
    spent = time.perf_counter() - began
    # What a run took that was stopped in between, nobody has measured.
    if fresh:
        files.write_json(output / "config.json", {**about, "seconds": spent})
    index = output / "index.faiss"
    typer.echo(
        f"Written in {spent:.0f} s: {output}/ (config.json, metrics.jsonl, results.json, "
        f"towers.safetensors, quantizer.safetensors, {'' if data is None else 'items.txt, '}"
        f"index.faiss of {out.size(index)})\n"
        f"Next: {out.command('givens', 'report', output, '-o', 'report.html')}, "
        f"{out.command('tensorboard', '--logdir', output)}"
    )


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
