"""Where a run stands, in a file: parts, optimizers' states and the best step so far.

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

from givens.retrieval.batches import Asked, Held
from givens.retrieval.config import difference
from givens.retrieval.run import Best, Run
from givens.storage import files

KIND, TOWERS, USERS = "checkpoint", "towers", "users"


def save(run: Run, path: Path) -> None:
    """Write where a run stands, in the place of an older file."""
    tensors = run.parts() | {f"best.{name}": part for name, part in run.best.parts.items()}
    numbers: dict[str, float] = {}
    for number, optimizer in enumerate(run.optimizers):
        for parameter, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                key = f"optimizer.{number}.{parameter}.{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value
                else:
                    numbers[key] = value
    about = {
        "config": dataclasses.asdict(run.config),
        "log": run.log.fingerprint,
        "step": run.step,
        "joint": run.joint,
        "best": {"recall": run.best.recall, "step": run.best.step},
        "numbers": numbers,
    }
    # There may be more than a file's header is to hold.
    rows = bytearray(json.dumps(run.rows).encode())
    tensors["rows"] = torch.frombuffer(rows, dtype=torch.uint8)
    files.save(path, KIND, tensors, about)


def load(run: Run, path: Path) -> None:
    """Put a fresh run where a saved one stood; one of another configuration or log is refused."""
    contents = files.load(path, KIND)
    with _wanting(path):
        _put(run, path, contents.metadata, contents.tensors)


def _put(run: Run, path: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if other := difference(about["config"], run.config):
        raise ValueError(f"{path} was made with {other}; give the same options or another folder")
    if about["log"] != run.log.fingerprint:
        raise ValueError(f"{path} was made from another log than {run.log.name}")
    run.step, run.rows = about["step"], json.loads(bytes(tensors.pop("rows").numpy()))
    # With the index, R may be parametrized: before its parts are put in.
    run.optimizers = run.learners(joint=about["joint"])
    run.put(tensors)
    run.turned_from = run.layer.rotation.matrix.detach().clone()
    best = {
        name.removeprefix("best."): part for name, part in tensors.items() if name[:5] == "best."
    }
    parts = {name: part.to(run.device) for name, part in best.items()}
    run.best = Best(about["best"]["recall"], about["best"]["step"], parts)
    for number, optimizer in enumerate(run.optimizers):
        states: dict[int, dict[str, Any]] = {}
        for key, value in (tensors | about["numbers"]).items():
            if key.startswith(f"optimizer.{number}."):
                _, _, parameter, name = key.split(".")
                states.setdefault(int(parameter), {})[name] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


@contextlib.contextmanager
def _wanting(path: Path) -> Iterator[None]:
    """Tell of a file that is whole and has not what it should have."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path} does not hold what givens saves there: {reason}") from error


def save_towers(run: Run, path: Path) -> None:
    """Write the towers and what they were made with."""
    about = {"config": dataclasses.asdict(run.config), "log": run.log.fingerprint}
    save_parts(run.parts(), path, about)


def save_parts(parts: dict[str, Tensor], path: Path, about: dict[str, Any] | None = None) -> None:
    """Write the towers among parts."""
    towers = {name: part for name, part in parts.items() if name.startswith("towers.")}
    files.save(path, TOWERS, towers, about or {})


def load_towers(path: Path) -> dict[str, Tensor]:
    """The parts that `save_towers` or `save_parts` wrote."""
    return files.load(path, TOWERS).tensors


def save_users(users: Tensor, held: Held, path: Path) -> None:
    """Write the vectors of held-out users, what they had seen and what they liked after it."""
    parts = {"queries": users, "seen": held.seen, "truth": held.truth, "sizes": held.sizes}
    files.save(path, USERS, parts, {})


def load_users(path: Path) -> tuple[Tensor, Held]:
    """What `save_users` wrote; what the users were asked by is not in it."""
    parts = files.load(path, USERS).tensors
    with _wanting(path):
        asked = Asked(torch.empty(len(parts["queries"]), 0, dtype=torch.int64))
        return parts["queries"], Held(asked, parts["seen"], parts["truth"], parts["sizes"])
