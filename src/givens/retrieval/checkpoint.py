"""The state of a run in a file: parts, optimizer states and the best step so far.

Draws depend only on the seed and the step, so there is no generator to save. The rows of split
tables are in files of their own, which the checkpoint names and which are written before it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from givens import distributed
from givens.retrieval.batches import HeldOut, Inputs
from givens.retrieval.config import find_difference
from givens.retrieval.rows import Entry, open_column, read_columns
from givens.retrieval.state import Best, State
from givens.retrieval.tables import RowWise
from givens.storage import files
from givens.storage.formats import File, Safetensors

KIND, TOWERS, USERS = "checkpoint", "towers", "users"
ITEMS = "towers.items.weight"


def save(state: State, path: Path) -> None:
    """Write a state, replacing an older file; all ranks must call this."""
    best = state.best
    # The files of the best step exist already.
    entries = best.rows if best.step == state.step else []
    entries = entries or state.files.save(state.columns(), state.first, state.step)
    distributed.from_first(lambda: _save(state, path, entries))
    state.files.kept = [*entries, *best.rows]
    state.files.keep([])


def _save(state: State, path: Path, entries: list[Entry]) -> None:
    tensors = state.parts() | {f"best.{name}": part for name, part in state.best.parts.items()}
    numbers: dict[str, float] = {}
    for number, optimizer in enumerate(state.optimizers):
        if isinstance(optimizer, RowWise):
            continue
        for parameter, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                key = f"optimizer.{number}.{parameter}.{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value
                else:
                    numbers[key] = value
    about = {
        "config": dataclasses.asdict(state.config),
        "log": state.log.fingerprint,
        "rules": state.log.rules,
        "step": state.step,
        "joint": state.joint,
        "best": {"recall": state.best.recall, "step": state.best.step, "rows": state.best.rows},
        "numbers": numbers,
        "rows": entries,
    }
    # The header of a file is too small for all rows.
    rows = bytearray(json.dumps(state.rows).encode())
    tensors["rows"] = torch.frombuffer(rows, dtype=torch.uint8)
    files.save(path, KIND, tensors, about)


def load(state: State, path: Path) -> None:
    """Restore a fresh state from a file of the same configuration and log."""
    contents = files.load(path, KIND)
    with _refuse_missing(path):
        _restore(state, path, contents.metadata, contents.tensors)


def _restore(state: State, path: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    options, given = about["config"] | about["rules"], dataclasses.asdict(state.config)
    if other := find_difference(options, given | state.log.rules):
        raise ValueError(f"{path} was made with {other}; give the same options or another folder")
    if about["log"] != state.log.fingerprint:
        raise ValueError(f"{path} was made from another log than {state.log.name}")
    rows = json.loads(bytes(tensors.pop("rows").numpy()))
    best = {
        name.removeprefix("best."): part for name, part in tensors.items() if name[:5] == "best."
    }
    optimizers: dict[int, dict[int, dict[str, Any]]] = {}
    for key, value in (tensors | about["numbers"]).items():
        if key.startswith("optimizer."):
            _, number, parameter, name = key.split(".")
            states = optimizers.setdefault(int(number), {})
            states.setdefault(int(parameter), {})[name] = value
    state.restore(
        about["step"],
        rows,
        tensors,
        Best(about["best"]["recall"], about["best"]["step"], best, about["best"].get("rows", [])),
        optimizers,
        about.get("rows", []),
        joint=about["joint"],
    )


@contextlib.contextmanager
def _refuse_missing(path: Path) -> Iterator[None]:
    """Raise a ValueError if an intact file lacks what it should hold."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} does not hold what givens saves there: {reason}") from error


def save_towers(state: State, path: Path) -> None:
    """Write the towers of a state, which is at its best step, with their configuration and log."""
    about: dict[str, Any] = {"config": dataclasses.asdict(state.config)}
    about["log"] = state.log.fingerprint
    if state.tables:
        about |= {"folder": state.files.folder.name, "rows": state.best.rows}
    save_parts(state.parts(), path, about)


def save_parts(parts: dict[str, Tensor], path: Path, about: dict[str, Any] | None = None) -> None:
    """Write those of the parts that belong to the towers."""
    towers = {name: part for name, part in parts.items() if name.startswith("towers.")}
    files.save(path, TOWERS, towers, about or {})


def load_towers(path: Path) -> dict[str, Tensor]:
    """The parts that `save_towers` or `save_parts` wrote, including all rows of split tables."""
    contents = files.load(path, TOWERS)
    if entries := contents.metadata.get("rows"):
        with _refuse_missing(path):
            folder = path.parent / Path(contents.metadata["folder"]).name
            for name, column in read_columns(folder, entries).items():
                if name.endswith(".weight"):
                    contents.tensors[name] = column
    return contents.tensors


def open_items(path: Path) -> File:
    """The item embeddings in a file of towers, read when they are sliced, as for `refresh`.

    They are not normalised; a cosine quantizer does that.
    """
    contents = files.read_header(path).metadata
    with _refuse_missing(path):
        if not contents.get("rows"):
            return Safetensors(path, ITEMS, None)
        return open_column(path.parent / Path(contents["folder"]).name, contents["rows"], ITEMS)


def save_users(users: Tensor, held: HeldOut, path: Path) -> None:
    """Write the vectors of held-out users, the items they have seen and those they liked next."""
    parts = {"queries": users, "seen": held.seen, "truth": held.truth, "sizes": held.sizes}
    files.save(path, USERS, parts, {})


def load_users(path: Path) -> tuple[Tensor, HeldOut]:
    """What `save_users` wrote; the inputs are not in the file and come back empty."""
    parts = files.load(path, USERS).tensors
    with _refuse_missing(path):
        inputs = Inputs(torch.empty(len(parts["queries"]), 0, dtype=torch.int64))
        return parts["queries"], HeldOut(inputs, parts["seen"], parts["truth"], parts["sizes"])
