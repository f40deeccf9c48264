"""`givens fit`: a quantizer for fixed embeddings."""

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer

from givens.cli import output as out
from givens.fixed.fit import METHODS, SAMPLE, Init, Method, Progress
from givens.fixed.fit import fit as fit_quantizer
from givens.quantizer import Metric, Quantizer, load
from givens.storage import vectors

# The most vectors to measure the distortion on.
MEASURED = 100_000
# Seconds between two checkpoints of a long run.
SAVED_EVERY = 10


def fit(
    source: Annotated[str, typer.Argument(metavar="VECTORS", help="The vectors to fit to.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The quantizer, .safetensors.")],
    subspaces: Annotated[int, typer.Option(help="Bytes of a code; divides the dimension.")] = 8,
    codewords: Annotated[int, typer.Option(help="Codewords of each subspace, 2 to 256.")] = 256,
    coarse: Annotated[int, typer.Option(help="Lists of an inverted file; 0 for none.")] = 0,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "gcd-greedy",
    metric: Annotated[str, typer.Option(help="l2, ip or cosine.")] = "l2",
    init: Annotated[
        str,
        typer.Option(help="auto, identity, eigen, random, or a quantizer to continue from."),
    ] = "auto",
    iterations: Annotated[
        int | None, typer.Option(help="Maximum number of passes; it may stop earlier.")
    ] = None,
    sample: Annotated[int, typer.Option(help="Vectors to learn from; 0 for all.")] = SAMPLE,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
    resume: Annotated[
        bool, typer.Option(help="Continue the same command where it was interrupted.")
    ] = False,
) -> None:
    """Learn a rotation and codebooks for vectors.

    Reads .npy, .fvecs, .bvecs, .ivecs, .hdf5, .parquet and .safetensors; name one of several tables
    as in glove.hdf5:train. A record, OUTPUT.json, is written beside the quantizer. A run of more
    than a few seconds keeps its state beside OUTPUT until it is done.

    Example: givens fit learn.fvecs -o q.safetensors --subspaces 8 --coarse 1024
    """
    began = time.perf_counter()
    if output.suffix != ".safetensors":
        raise ValueError(f"{output} must end in .safetensors")
    place = out.check_device(device)
    x = vectors.read(source, "train")
    start = _read_start(init)
    earlier = None if isinstance(start, str) else init
    out.check_outputs({"--output": output}, [source, earlier])
    chosen = {
        "vectors": source,
        "subspaces": subspaces,
        "codewords": codewords,
        "coarse": coarse,
        "method": method,
        "metric": metric,
        "init": init,
        "iterations": iterations,
        "sample": sample,
    }
    part = _name_part(output, {**chosen, "seed": seed, "shape": list(x.shape)})
    before = Progress.load(part) if resume and part.exists() else None
    if resume and before is None:
        typer.echo("There is nothing to go on from: no such run was interrupted here", err=True)
    passes: list[float] = []
    saved = began
    with out.progress("fitting") as bar:

        def tell(progress: Progress) -> None:
            nonlocal saved
            if time.perf_counter() - saved > SAVED_EVERY:
                progress.save(part)
                saved = time.perf_counter()
            passes.append(progress.distortion)
            note = f"distortion {progress.distortion:.5g}"
            bar.stand(progress.iteration, progress.iterations, note)

        q = fit_quantizer(
            x,
            subspaces,
            codewords=codewords,
            coarse=coarse,
            method=cast(Method, method),
            metric=cast(Metric, metric),
            init=start,
            seed=seed,
            max_iter=iterations,
            sample=sample,
            callback=tell,
            resume=before,
            device=place,
        ).to("cpu")
    spent = time.perf_counter() - began
    q.save(output)
    error, norm = _measure(q, x)
    about = out.make_record(seed, device, **chosen)
    results = {"seconds": spent, "distortion": error, "distortion_by_pass": passes}
    out.write_record(output, {**about, **results, "fingerprint": q.fingerprint})
    part.unlink(missing_ok=True)
    typer.echo(
        f"Fitted {method} to {len(x):,} vectors of {x.shape[1]} in {spent:.1f} s: "
        f"{subspaces} subspaces of {codewords} codewords"
        + (f", {coarse:,} lists" if coarse else "")
        + f"\nDistortion: {error:.5g}, {100 * error / norm:.1f} % of the mean squared norm, on "
        f"{min(len(x), MEASURED):,} vectors\n"
        f"Written: {output} ({out.format_size(output)}), {output}.json\n"
        f"Next: {out.quote_command('givens', 'build', output, 'VECTORS', '-o', 'index.faiss')}"
    )


def _name_part(output: Path, chosen: dict[str, Any]) -> Path:
    """The file of a run's state, which depends on the configuration."""
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
    return output.with_name(f"{output.name}.{digest}.part")


def _read_start(init: str) -> Init | Quantizer:
    if init in get_args(Init):
        return cast(Init, init)
    if not init.endswith(".safetensors"):
        known = ", ".join(get_args(Init))
        raise ValueError(f"--init must be one of {known}, or a quantizer file, but got {init!r}")
    return load(init)


def _measure(q: Quantizer, x: Any) -> tuple[float, float]:
    """The distortion and the mean squared norm of the first finite vectors."""
    part = vectors.as_float(x[:MEASURED])
    part = part[part.isfinite().all(1)]
    if q.metric == "cosine":
        part = torch.nn.functional.normalize(part)
    norm = float(part.square().sum(1, dtype=torch.float64).mean())
    return q.distortion(part), max(norm, 1e-300)
