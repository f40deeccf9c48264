"""The state of a run in a file: parts, optimizers' states and the best step so far.

What is drawn depends on the seed and the step alone, so there is no generator to save.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from givens.retrieval.batches import HeldOut, Inputs
from givens.retrieval.config import find_difference
from givens.retrieval.state import Best, State
from givens.storage import files

KIND, TOWERS, USERS = "checkpoint", "towers", "users"


def save(state: State, path: Path) -> None:
    """Write a state, in the place of an older file."""
    tensors = state.parts() | {f"best.{name}": part for name, part in state.best.parts.items()}
    numbers: dict[str, float] = {}
    for number, optimizer in enumerate(state.optimizers):
        for parameter, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
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
        "best": {"recall": state.best.recall, "step": state.best.step},
        "numbers": numbers,
    }
    # There may be more rows than a file's header can hold.
    rows = bytearray(json.dumps(state.rows).encode())
    tensors["rows"] = torch.frombuffer(rows, dtype=torch.uint8)
    files.save(path, KIND, tensors, about)


def load(state: State, path: Path) -> None:
    """Restore a fresh state from a file; one of another configuration or log is refused."""
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
        Best(about["best"]["recall"], about["best"]["step"], best),
        optimizers,
        joint=about["joint"],
    )


@contextlib.contextmanager
def _refuse_missing(path: Path) -> Iterator[None]:
    """Refuse a file that is whole but lacks what it should hold."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} does not hold what givens saves there: {reason}") from error


def save_towers(state: State, path: Path) -> None:
    """Write the towers and what they were made with."""
    about = {"config": dataclasses.asdict(state.config), "log": state.log.fingerprint}
    save_parts(state.parts(), path, about)


def save_parts(parts: dict[str, Tensor], path: Path, about: dict[str, Any] | None = None) -> None:
    """Write the towers among parts."""
    towers = {name: part for name, part in parts.items() if name.startswith("towers.")}
    files.save(path, TOWERS, towers, about or {})


def load_towers(path: Path) -> dict[str, Tensor]:
    """The parts that `save_towers` or `save_parts` wrote."""
    return files.load(path, TOWERS).tensors


def save_users(users: Tensor, held: HeldOut, path: Path) -> None:
    """Write the vectors of held-out users, what they had seen and what they liked after it."""
    parts = {"queries": users, "seen": held.seen, "truth": held.truth, "sizes": held.sizes}
    files.save(path, USERS, parts, {})


def load_users(path: Path) -> tuple[Tensor, HeldOut]:
    """What `save_users` wrote, with empty inputs: they are not in the file."""
    parts = files.load(path, USERS).tensors
    with _refuse_missing(path):
        inputs = Inputs(torch.empty(len(parts["queries"]), 0, dtype=torch.int64))
        return parts["queries"], HeldOut(inputs, parts["seen"], parts["truth"], parts["sizes"])
