"""`givens tokens`: semantic IDs of items, for recommenders that generate them."""

import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer

from givens.cli import output as out
from givens.fixed.fit import SAMPLE, Method
from givens.storage import files, vectors

# The options of learning a tokenizer.
LEARNING = ("subspaces", "codewords", "stages", "method", "metric", "sample", "seed")
SUFFIXES = (".parquet", ".npy")


def tokens(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="VECTORS", help="The items' vectors.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The IDs to write, .parquet or .npy.")
    ],
    subspaces: Annotated[
        int, typer.Option(help="Tokens of the rotated tail; divides the dimension. 0 for none.")
    ] = 8,
    codewords: Annotated[
        int, typer.Option(help="Different tokens at each place of the tail, 2 to 256.")
    ] = 256,
    stages: Annotated[
        str, typer.Option(help="Sizes of residual stages before the tail, as 256,256.")
    ] = "",
    method: Annotated[
        str | None, typer.Option(help="How the tail is rotated, as in `givens fit`.")
    ] = None,
    metric: Annotated[str, typer.Option(help="l2 or cosine.")] = "l2",
    further: Annotated[
        bool, typer.Option("--further", help="One more token, so that no two items share an ID.")
    ] = False,
    items: Annotated[
        Path | None, typer.Option(help="Names of the items, a line each; positions if left out.")
    ] = None,
    quantizer: Annotated[
        Path | None,
        typer.Option(help="Take its codes, from an earlier run or `givens fit`; learn nothing."),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(help="IDs of an earlier run with this --quantizer, kept where codes are."),
    ] = None,
    sample: Annotated[int, typer.Option(help="Vectors to learn from; 0 for all.")] = SAMPLE,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Make semantic IDs of items, for a recommender that generates them.

    Writes the name and the tokens of each item, and reports how many items share their tokens and
    how evenly tokens are used. A record, OUTPUT.json, is written beside the IDs, and so is the
    tokenizer, OUTPUT with the suffix .safetensors; with it a later run gives the same tokens.

    After the vectors have changed: with --quantizer and --previous, only items whose codes have
    changed get new IDs.

    Example: givens tokens items.npy -o ids.parquet --subspaces 32 --further

    Example: givens tokens new.npy -o new.parquet --quantizer ids.safetensors --previous ids.parquet
    """
    from givens.tokens import Ids, Tokenizer, assign, report

    began = time.perf_counter()
    if output.suffix not in SUFFIXES:
        raise ValueError(f"{output} must end in .parquet or .npy")
    if output.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ImportError(f"{output} needs pyarrow: pip install 'givens[formats]', or write .npy")
    if previous is not None and quantizer is None:
        raise ValueError(
            f"--previous needs the --quantizer that made {previous}: by another one, the same "
            "tokens would mean other things"
        )
    if quantizer is not None:
        _check_left_out(context, LEARNING)
    x = vectors.read(source, "items")
    made = output.with_suffix(".safetensors")
    read = [path for path in (items, quantizer, previous) if path is not None]
    outputs = {"--output": output, "the quantizer": made if quantizer is None else None}
    out.check_outputs(outputs, [source, *read])
    if quantizer is None:
        _check_replaceable(made)
    names = _read_item_names(items, x)
    tokenizer: Tokenizer
    if quantizer is None:
        how = (subspaces, codewords, _parse_sizes(stages), method, metric, seed, sample or None)
        tokenizer = _learn(x, *how)
    else:
        if not quantizer.is_file():
            raise FileNotFoundError(f"there is no quantizer {quantizer}")
        tokenizer = Tokenizer.load(quantizer)
    before = None
    if previous is not None:
        before = Ids.load(previous)
        _check_maker(previous, tokenizer)
    codes = tokenizer.encode(x)
    assigned = assign(codes, names, further=further, previous=before)
    ids, told = assigned.ids, report(codes, tokenizer.sizes)
    error, norm = tokenizer.distortion(x), _measure_norm(x, tokenizer)
    if quantizer is None:
        tokenizer.save(made)
    ids.save(output)
    spent = time.perf_counter() - began
    about = out.make_record(
        seed if quantizer is None else None,
        "cpu",
        vectors=source,
        subspaces=subspaces,
        codewords=codewords,
        stages=stages,
        method=method,
        metric=metric,
        further=further,
        items=items,
        quantizer=quantizer,
        previous=previous,
        sample=sample,
    )
    vocabulary = tokenizer.sizes + [int(ids.tokens[:, -1].max()) + 1] * further
    results = {
        "seconds": spent,
        "fingerprint": tokenizer.fingerprint,
        "vocabulary": vocabulary,
        "distortion": error,
        **dataclasses.asdict(told),
    }
    if assigned.churn is not None:
        results["churn"] = {**dataclasses.asdict(assigned.churn), "rate": assigned.churn.rate}
    out.write_record(output, {**about, **results})
    lines = [
        f"Tokens of {len(x):,} items in {spent:.1f} s: {ids.tokens.shape[1]} each, "
        f"of {' × '.join(map(str, vocabulary))}",
        f"Distortion: {error:.5g}, {100 * error / norm:.1f} % of the mean squared norm",
        f"Collisions: {100 * told.colliding:.2f} % of the items share their codes with another; "
        f"{told.distinct:,} different codes, the most common of {told.largest:,} items",
        f"Perplexity: {min(told.perplexity):.1f} to {max(told.perplexity):.1f} at a place; "
        f"tokens in use: {sum(told.used):,} of {sum(tokenizer.sizes):,}",
    ]
    if assigned.churn is not None:
        churn = assigned.churn
        lines.append(
            f"Churn: {100 * churn.rate:.2f} %, {churn.changed:,} of {churn.kept + churn.changed:,} "
            f"items have a new ID; {churn.added:,} items came, {churn.removed:,} went"
        )
    written = f"Written: {output} ({out.format_size(output)}), {output}.json"
    lines.append(written + ("" if quantizer is not None else f", {made}"))
    again = quantizer or made
    refresh: tuple[object, ...] = (
        "tokens",
        "VECTORS",
        "-o",
        "new" + output.suffix,
        "--quantizer",
        again,
    )
    refresh += ("--previous", output, *(["--further"] * further))
    lines.append(f"Next: after the vectors have changed, {out.quote_command('givens', *refresh)}")
    typer.echo("\n".join(lines))


def _learn(
    x: Any,
    subspaces: int,
    codewords: int,
    stages: list[int],
    method: str | None,
    metric: str,
    seed: int,
    sample: int | None,
) -> Any:
    from givens.tokens import fit

    with out.progress("fitting") as bar:
        return fit(
            x,
            subspaces,
            codewords,
            stages,
            method=cast(Method | None, method),
            metric=cast(Any, metric),
            seed=seed,
            sample=sample,
            callback=lambda at: bar.stand(
                at.iteration, at.iterations, f"distortion {at.distortion:.5g}"
            ),
        )


def _parse_sizes(stages: str) -> list[int]:
    try:
        return [int(size) for size in stages.split(",") if stages]
    except ValueError as error:
        raise ValueError(f"--stages must be sizes as 256,256, but got {stages!r}") from error


def _read_item_names(path: Path | None, x: Any) -> Any:
    """Read the items' names from their file, or from vectors as text; None for positions."""
    if path is None:
        own = vectors.names_of(x)
        return None if own is None else np.array(own, object)
    try:
        names = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--items must be text in UTF-8, but {path} is not") from error
    names = names[:-1] if names[-1] == "" else names
    if len(names) != len(x):
        raise ValueError(
            f"--items must have {len(x):,} lines, one a vector, but has {len(names):,}"
        )
    return np.array(names, object)


def _check_left_out(context: typer.Context, options: tuple[str, ...]) -> None:
    """Check that nothing is asked of learning by a command that learns nothing."""
    for name in options:
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE":
            raise ValueError(
                f"--{name} must be left out with --quantizer, which was learned with its own"
            )


def _check_replaceable(path: Path) -> None:
    """Check that the tokenizer would not replace a file of another kind, such as a model."""
    from givens.tokens import TOKENIZER

    if path.exists():
        try:
            kind = files.read_header(path).kind
        except ValueError:
            kind = "file of another program"
        if kind != TOKENIZER:
            raise ValueError(
                f"the tokenizer would be written to {path}, which is a {kind}; "
                "choose another --output, or take that file away"
            )


def _check_maker(previous: Path, tokenizer: Any) -> None:
    """Check that the IDs were made by this quantizer, if their record is there."""
    maker = out.read_record(previous).get("fingerprint", tokenizer.fingerprint)
    if maker != tokenizer.fingerprint:
        raise ValueError(
            f"--previous must be made by --quantizer, but {previous}.json names another one "
            f"({maker}): the same tokens would mean other things"
        )


def _measure_norm(x: Any, tokenizer: Any) -> float:
    if tokenizer.normalise or (tokenizer.tail and tokenizer.tail.metric == "cosine"):
        return 1.0
    total = sum(
        float(part.square().sum(dtype=torch.float64)) for part in vectors.chunks(x, 1 << 14)
    )
    return max(total / len(x), 1e-300)
