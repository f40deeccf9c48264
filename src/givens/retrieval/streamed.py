"""Logs that are streamed from their files: what is held in memory, and its file.

A survey of the files finds the vocabulary, the popularity of items, the number of examples in each
row group, and the clicks of held-out users. It is saved in the folder of the run, so that a resumed
run needs no new survey unless a file has changed.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from givens import distributed
from givens.checks import check_number, check_whole
from givens.retrieval.data import LARGEST, Log, Selection
from givens.retrieval.grouping import FOLDER, group_users
from givens.retrieval.parquet import Source
from givens.retrieval.survey import NotTogetherError, Parts, names_of, survey
from givens.storage import files

KIND, FILE = "log", "log.safetensors"

Tell = Callable[[str], object]
Progress = Callable[[int, int], object]


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedLog(Log):
    """A log in Parquet files. `starts`, `items` and `times` are those of held-out users only."""

    selection: Selection
    source: Source
    popularity: Int[np.ndarray, " catalogue"]
    """How often training users have clicked each item."""
    examples: Int[np.ndarray, " groups"]
    """For each row group, the number of examples of the training users that begin in it."""
    lead: Int[np.ndarray, " groups"]
    """For each group, its first clicks that belong to an earlier user; −n if all n clicks do."""
    held: Int[np.ndarray, " held"]
    """The keys of held-out users."""
    keys: Int[np.ndarray, " catalogue"] | None
    """The key of each item; None if items are hashed."""
    clicks: int
    """The number of clicks of all valid users."""
    everyone: int
    """The number of valid users."""

    @property
    def rules(self) -> dict[str, float]:
        """The rules that selected rows and users, and the number of rows for hashed items."""
        return super().rules | ({"hash_items": self.catalogue} if self.keys is None else {})

    @property
    def streamed(self) -> bool:
        """True."""
        return True

    @property
    def users(self) -> int:
        """The number of valid users."""
        return self.everyone

    @property
    def unseen(self) -> int:
        """The number of items that no training user has clicked."""
        return self.catalogue - int(np.count_nonzero(self.popularity))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest by which a checkpoint identifies its log."""
        digest = hashlib.sha256(f"{self.catalogue}".encode())
        parts = (self.starts, self.items, self.held, self.examples, self.lead, self.popularity)
        for part in (*parts, self.keys):
            digest.update(b"" if part is None else np.ascontiguousarray(part).data)
        return digest.hexdigest()[:32]

    def __str__(self) -> str:
        rows, unseen = f"{self.catalogue:,} items", "items seen"
        if self.keys is None:
            rows, unseen = f"{self.catalogue:,} rows that items share by a hash", "rows used"
        return (
            f"{self.name}: {self.clicks:,} clicks of {self.users:,} users on {rows}; "
            f"{len(self.valid):,} users held out for validation, {len(self.test):,} for the test; "
            f"{self.unseen:,} {unseen} by none but them; streamed from {len(self.source.files):,} "
            f"files in {len(self.source):,} row groups"
        )


def read_streamed(
    path: Path,
    *,
    min_rating: float,
    min_items: int,
    held_out: int,
    seed: int,
    hash_items: int | None = None,
    folder: Path | None = None,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> StreamedLog:
    """Read the log in a folder of Parquet files; the survey is saved in the run's folder.

    Args:
        path: the folder, or a file.
        min_rating: rows with lower ratings are left out; without ratings every row counts.
        min_items: users with fewer rows than this are left out.
        held_out: users for validation, and as many for the test; a fifth if there are few.
        seed: the seed of the draw of held-out users.
        hash_items: the number of rows that items share by a hash; by default each has its own.
        folder: the folder of the run; None saves nothing, and needs a log sorted by user.
        tell: called with a line for each further step.
        progress: called with the number of rows done and their total.
    """
    check_number("min_rating", min_rating, -LARGEST)
    check_whole("min_items", min_items, 2)
    if hash_items is not None:
        check_whole("hash_items", hash_items, 1)
    rules = {
        "min_rating": min_rating,
        "min_items": min_items,
        "held_out": held_out,
        "seed": seed,
        "hash_items": hash_items,
    }
    tell, progress = tell or _ignore, progress or _ignore
    source = distributed.run_together(lambda: Source(path))
    if folder is None:
        return _assemble(source, rules, *survey(source, progress, **rules))
    kept = folder / FILE
    distributed.from_first(lambda: _survey_once(source, rules, folder, tell, progress))
    return distributed.run_together(lambda: _load(source, rules, kept))


def _survey_once(
    source: Source, rules: dict[str, Any], folder: Path, tell: Tell, progress: Progress
) -> None:
    """Survey the files, unless there is a survey and they have not changed."""
    kept, stamps = folder / FILE, _stamp(source)
    grouped: dict[str, list[int]] = {}
    if kept.exists():
        about = files.read_header(kept).metadata
        now = {"stamps": stamps}
        if about["grouped"]:
            now["grouped"] = _stamp_folder(folder / FOLDER)
        if about["stamped"] == _digest(now):
            if about["rules"] == rules:
                return
            # The rules are other ones, but the log is sorted already.
            grouped = now.get("grouped", {})
        elif about["rules"] == rules:
            changed = _find_change(_read_stamps(kept), stamps) or str(folder / FOLDER)
            tell(f"{changed} has changed since {kept} was written: the log is read again")
    try:
        if grouped:
            source = Source(folder / FOLDER, source.title)
        parts, about = survey(source, progress, **rules)
    except NotTogetherError as error:
        rows = int(source.groups[:, 2].sum())
        tell(
            f"{error}".partition("; ")[0] + f": its {rows:,} rows are sorted into {folder / FOLDER}"
        )
        sorted_source = group_users(source, folder / FOLDER, stamps, progress)
        parts, about = survey(sorted_source, progress, **rules)
        grouped = _stamp(sorted_source)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.from_numpy(np.require(part, requirements=("C", "W")))
        for name, part in parts.items()
    }
    tensors["stamps"] = torch.frombuffer(bytearray(json.dumps(stamps).encode()), dtype=torch.uint8)
    lists = {"stamps": stamps, **({"grouped": grouped} if grouped else {})}
    about |= {"rules": rules, "grouped": bool(grouped), "stamped": _digest(lists)}
    files.save(kept, KIND, tensors, about)


def _load(source: Source, rules: dict[str, Any], kept: Path) -> StreamedLog:
    """Load the log of a saved survey, after checking that this rank sees the same files."""
    contents = files.load(kept, KIND)
    parts = {name: tensor.numpy() for name, tensor in contents.tensors.items()}
    first, mine = json.loads(bytes(parts.pop("stamps"))), _stamp(source)
    # Copies on other machines may have other times.
    if [*map(_drop_time, first.items())] != [*map(_drop_time, mine.items())]:
        raise ValueError(
            f"{source.path} must hold the same files for all ranks, but does not on one of them"
        )
    if contents.metadata["grouped"]:
        source = Source(kept.parent / FOLDER, source.title)
    if len(source) != len(parts["examples"]):
        raise ValueError(
            f"{source.path} must have {len(parts['examples'])} row groups as {kept} says, but has "
            f"{len(source)}; remove {kept.name} to read the log again"
        )
    return _assemble(source, rules, parts, contents.metadata)


def _assemble(
    source: Source, rules: dict[str, Any], parts: Parts, about: dict[str, Any]
) -> StreamedLog:
    out = len(parts["users"]) // 2
    halves = np.arange(out), np.arange(out, 2 * out)
    return StreamedLog(
        source.title,
        parts["starts"],
        parts["items"],
        # Times are not needed: the clicks of held-out users are sorted.
        np.zeros(len(parts["items"]), np.float32),
        len(parts["popularity"]),
        np.empty(0, np.int64),
        *halves,
        names=names_of(parts),
        selection=Selection(**about["selection"]),
        source=source,
        popularity=parts["popularity"],
        examples=parts["examples"],
        lead=parts["lead"],
        held=np.sort(parts["users"]),
        keys=None if rules["hash_items"] else parts["keys"],
        clicks=about["clicks"],
        everyone=about["users"],
    )


def _stamp(source: Source) -> dict[str, list[int]]:
    """The size and time of each file, by name."""
    found = {}
    for file in source.files:
        about = file.stat()
        name = file.relative_to(source.path).as_posix() if file != source.path else file.name
        found[name] = [about.st_size, about.st_mtime_ns]
    return found


def _stamp_folder(folder: Path) -> dict[str, list[int]]:
    try:
        return _stamp(Source(folder))
    except (OSError, ValueError):
        return {}


def _read_stamps(kept: Path) -> dict[str, list[int]]:
    return dict(json.loads(bytes(files.load(kept, KIND).tensors["stamps"].numpy())))


def _digest(stamps: dict[str, dict[str, list[int]]]) -> str:
    return hashlib.sha256(json.dumps(stamps, sort_keys=True).encode()).hexdigest()


def _drop_time(entry: tuple[str, list[int]]) -> tuple[str, int]:
    return entry[0], entry[1][0]


def _find_change(before: dict[str, list[int]], now: dict[str, list[int]]) -> str | None:
    """The first file that is new, missing or changed; None if there is none."""
    names = sorted({*before, *now})
    return next((name for name in names if before.get(name) != now.get(name)), None)


def _ignore(*values: object) -> None:
    """Do nothing."""
