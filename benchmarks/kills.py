"""Commands stopped at random moments: is anything lost, and does a second run end alike?

    python benchmarks/kills.py --json results/kills.json --moments 200
    python benchmarks/kills.py --moments 3                               a minute

For each of fit, build (locally and on Ray), train and search: the command overwrites the results of
an earlier run and is stopped by SIGKILL, SIGTERM or SIGINT at a random moment. Then each result
must be the old or the new one. After the same command is run again (with --resume if it has one),
each must be the new one, byte for byte, with no other files left. After SIGTERM and SIGINT there
must be one line on stderr, unless the command has ended.

Commands run in children of a process that has imported the package, so that they are stopped at
work and not during imports.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from files import environment

import givens
import givens.__main__ as beginning
import givens.export.faiss
import givens.export.shards
import givens.retrieval.train
from givens.cli import fit as fit_module
from givens.cli import main as givens_main
from givens.storage import files

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TRAIN = "--dim 16 --subspaces 4 --codewords 16 --batch 64 --warmup 20 --steps 20 --every 5"


@dataclass(frozen=True)
class Command:
    """A command, the earlier command whose results it overwrites, and its results."""

    name: str
    words: str
    # The earlier command: words of this one, and what replaces them.
    old: tuple[str, str] | None
    results: tuple[str, ...]
    resume: bool = False


COMMANDS = (
    Command(
        "fit",
        "fit x.npy -o q2.safetensors --subspaces 8 --codewords 16 --iterations 10 --seed 1",
        ("--seed 1", "--seed 2"),
        ("q2.safetensors",),
        resume=True,
    ),
    Command(
        "build",
        "build q.safetensors big.npy -o b.faiss",
        ("big.npy", "x.npy"),
        ("b.faiss",),
    ),
    Command(
        "build --engine ray",
        "build q.safetensors big.npy -o r.faiss --engine ray --workers 1",
        ("big.npy -o r.faiss --engine ray --workers 1", "x.npy -o r.faiss"),
        ("r.faiss",),
    ),
    Command(
        "train",
        f"train -o run --data clicks.txt {TRAIN}",
        None,
        ("run/quantizer.safetensors", "run/towers.safetensors", "run/metrics.jsonl"),
        resume=True,
    ),
    Command(
        "search",
        "search i.faiss x.npy -k 10 --nprobe 16 -o n.npy --scores s.npy",
        ("-k 10", "-k 5"),
        ("n.npy", "s.npy"),
    ),
)


def prepare() -> None:
    """Write vectors, a quantizer and a click log into the current folder."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4000, 32)).astype(np.float32)
    np.save("x.npy", x)
    np.save("big.npy", np.concatenate([x] * 5))
    t = torch.from_numpy(x)
    words = 0.5 * t[:64].reshape(64, 8, 4).transpose(0, 1)
    givens.Quantizer(torch.eye(32), words, t[100:164]).save("q.safetensors")
    items = (generator.integers(0, 90, (200, 1)) + generator.integers(0, 12, (200, 20))) % 90
    lines = [f"{user} {item}\n" for user in range(200) for item in items[user]]
    Path("clicks.txt").write_text("".join(lines))


def start(words: str) -> int:
    """Start a command in a child, with output in files; signals wait until it handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS[1:])
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        for number, name in ((1, "told"), (2, "error")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666), number)
        sys.argv = ["givens", *words.split()]
        # The handler of a command that is still importing the package.
        for number in SIGNALS[1:]:
            signal.signal(number, beginning._leave)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
        try:
            givens_main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        sys.stdout.flush()
        os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS[1:])
    return child


def wait_for(child: int) -> int:
    """Wait for a child; returns its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(words: str) -> float:
    """Run a command to its end; returns the seconds."""
    began = time.perf_counter()
    if wait_for(start(words)) != 0:
        raise RuntimeError(f"givens {words}: {Path('error').read_text()}")
    return time.perf_counter() - began


def read_results(names: tuple[str, ...]) -> dict[str, bytes | None]:
    """The present contents of each result, or None."""
    return {name: Path(name).read_bytes() if Path(name).exists() else None for name in names}


def clear(command: Command, old: dict[str, bytes | None], beside: dict[str, bytes]) -> None:
    """Restore the folder as it was before the command."""
    shutil.rmtree("run", ignore_errors=True)
    for path in Path().iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in beside:
            path.unlink()
    for name, content in beside.items():
        if not Path(name).exists() or Path(name).read_bytes() != content:
            Path(name).write_bytes(content)


def stop(command: Command, moments: int, minutes: float) -> dict[str, Any]:
    """Stop a command at random moments; returns a row that counts broken promises."""
    if command.old is not None:
        run(command.words.replace(*command.old))
    old = read_results(command.results)
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    spent = run(command.words)
    new = read_results(command.results)
    present = list_files()
    wrong: Counter[str] = Counter({"lost": 0, "other end": 0, "left behind": 0, "not one line": 0})
    answers: Counter[str] = Counter()
    examples: dict[str, str] = {}
    draw, done, until = random.Random(0), 0, time.monotonic() + 60 * minutes
    while done < moments and time.monotonic() < until:
        moment, done = done, done + 1
        clear(command, old, before)
        how = SIGNALS[moment % len(SIGNALS)]
        child = start(command.words)
        time.sleep(draw.uniform(0, spent))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, how)
        code = wait_for(child)
        answers["ended before" if code == 0 else how.name] += 1
        now, error = read_results(command.results), Path("error").read_text()
        bad = []
        if any(now[name] not in (old[name], new[name]) for name in now) and not command.resume:
            bad.append("lost")
        if command.name == "fit" and now != old and now != new:
            bad.append("lost")
        for index in ("b.faiss", "r.faiss"):
            if index in now:
                try:
                    givens.export.faiss.load_index(index)
                except (ValueError, OSError) as refusal:
                    error += str(refusal)
                    bad.append("lost")
        if how != signal.SIGKILL and code != 0:
            said = error.splitlines()
            if code != 128 + how or len(said) != 1 or "interrupted" not in said[0]:
                bad.append("not one line")
        run(command.words + " --resume" * command.resume)
        if read_results(command.results) != new:
            bad.append("other end")
        if list_files() - present:
            bad.append("left behind")
            error += f" {sorted(list_files() - present)}"
        for what in set(bad):
            wrong[what] += 1
            examples.setdefault(what, f"moment {moment}, {how.name}, {code}: {error[-300:]}")
    return {
        "part": "stopped commands",
        "command": command.name,
        "moments": done,
        "seconds": round(spent, 2),
        "answers": dict(answers),
        **wrong,
        "examples": examples,
    }


def list_files() -> set[str]:
    """All files, except those with a time in their names."""
    found = {str(path) for path in Path().rglob("*") if path.is_file()}
    return {name for name in found if "tensorboard" not in name}


def main() -> None:
    """Stop every command and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--moments", type=int, default=200, help="moments for each command")
    parser.add_argument("--minutes", type=float, default=60, help="most minutes for each command")
    parser.add_argument("--only", default="", help="commands, comma-separated; all if left out")
    options = parser.parse_args()
    # Threads do not survive a fork; children would wait for them.
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    # Save states often enough that some are resumed.
    sys.modules[fit_module.__module__].SAVED_EVERY = 0.05
    about, rows, home = environment(), [], Path.cwd()
    chosen = [one for one in COMMANDS if not options.only or one.name in options.only.split(",")]
    for command in chosen:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            prepare()
            if command.name == "search":
                run("build q.safetensors x.npy -o i.faiss")
            rows.append(stop(command, options.moments, options.minutes))
            os.chdir(home)
        print({name: value for name, value in rows[-1].items() if name != "examples"}, flush=True)
        for what, example in rows[-1]["examples"].items():
            print(f"  {what}: {example}", flush=True)
    if options.json:
        files.write_json(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
