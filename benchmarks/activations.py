"""Loss and 4-bit error against steps and time, for rotations before the layers of MiniLM.

    python benchmarks/activations.py --json results/activations.json
    python benchmarks/activations.py --json … --time-json … --time
    python benchmarks/activations.py --json … --time-json … --table --plot results/activations.png

Rates are chosen as in learn.py: each method has the best rate of a grid of factor √10 on hidden
seeds, which use another layer and other texts than the shown seeds, and the grid is widened at its
edge.
"""

import argparse
import functools
import runpy
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import curves
import learn
import torch
from minilm import LEVELS, Input, collect_inputs, load_model, output_error, read_manual
from problems import Problem
from torch import Tensor

import givens
from givens.paper import rows

EXAMPLE = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "activations.py"))
# The middle of each grid, as the power of √10.
METHODS = {"gcd": -2, "gcd-all": -2, "gcd-greedy": -2, "cayley": -4, "qr": -5}
METHODS |= {"cayley-sgd": 0, "pogo": 1}
ROUNDS, JUDGED = 9, 512


class Place(NamedTuple):
    """A problem: a layer whose inputs are rotated, its size and the steps."""

    layer: str
    n: int
    steps: int
    loss: str = "peak"
    hidden_seeds: int = 2


OTHERS = ("kurtosis", "whip", "output", "kurtosis of inputs", "whip of inputs")
LONGER = "attention by peak in 130 steps"
PLACES = {
    "attention": Place("attention.qkv", 384, 80),
    # Takes as long as 80 steps of POGO, Cayley SGD, QR or GCD with all planes.
    LONGER: Place("attention.qkv", 384, 130),
    **{f"attention by {loss}": Place("attention.qkv", 384, 80, loss) for loss in OTHERS},
    "ffn": Place("output.dense", 1536, 15, hidden_seeds=1),
}
TITLES = {"attention": "Query, key and value", "ffn": "Second layer of the FFN"}
SHOWN_BLOCK, HIDDEN_BLOCK = 3, 1


def kurtosis(Y: Tensor) -> Tensor:
    """KurTail's loss: the fourth moment over the square of the second."""
    return Y.pow(4).mean() / Y.square().mean().square()


def whip(Y: Tensor) -> Tensor:
    """DartQuant's loss: small if no entry is near zero, with rows scaled to a mean square of 1."""
    return (-(Y / Y.square().mean(1, keepdim=True).sqrt()).abs()).exp().mean()


def straight_through(Y: Tensor) -> Tensor:
    """Y rounded to multiples of its rows' steps, with a gradient through the steps only.

    The rounding error in units of a step is held fixed. With fixed steps, the errors of inputs and
    weights would cancel in the gradient of R.
    """
    step = Y.abs().amax(1, keepdim=True) / LEVELS
    return Y + step * ((Y / step).round() - Y / step).detach()


def loss_of_output(Y: Tensor, Z: Tensor) -> Tensor:
    """SpinQuant's loss for one layer: the relative error of its output."""
    exact = (Y @ Z.mT).detach()
    lost = straight_through(Y) @ straight_through(Z).mT - exact
    return lost.square().sum() / exact.square().sum()


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "peak": EXAMPLE["peak"],
    "kurtosis": kurtosis,
    "whip": whip,
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"output": loss_of_output}
for name, part in PARTS.items():
    LOSSES[name] = lambda Y, Z, part=part: part(Y) + part(Z)
    LOSSES[f"{name} of inputs"] = lambda Y, Z, part=part: part(Y)


@functools.cache
def read_texts(hidden: bool, smoke: bool) -> tuple[dict[str, Input], dict[str, Input]]:
    """Inputs for training and for evaluation; hidden and shown seeds have different texts."""
    model, texts = load_model(smoke), read_manual()[256:]
    first, second, third = (128, 224, 256) if hidden else (0, 96, 128)
    return collect_inputs(model, texts[first:second]), collect_inputs(model, texts[second:third])


class Activations(Problem):
    """A rotation before one 4-bit layer. Figure: the relative error of the held-out output."""

    def __init__(self, place: Place, smoke: bool, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        hidden = seed in learn.HIDDEN_SEEDS
        block = HIDDEN_BLOCK if hidden else 0 if smoke else SHOWN_BLOCK
        name = f"layer.{block}.{place.layer}"
        learned, judged = (part[name] for part in read_texts(hidden, smoke))
        self.X, self.M, self.unseen = learned.X, learned.M, judged.X[:JUDGED]
        self.start = givens.random_rotation(n, seed)
        self.loss_of = LOSSES[place.loss]

    def draw_batch(self) -> tuple[Tensor, ...]:
        """A batch of tokens and of rows of the weights."""
        sizes = ((self.X, EXAMPLE["TOKENS"]), (self.M, EXAMPLE["ROWS"]))
        return tuple(Y[torch.randint(len(Y), (count,), generator=self.draws)] for Y, count in sizes)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """The loss of a batch."""
        x, w = batch
        return self.loss_of(x @ W.mT, w @ W.mT)

    def figure(self, W: Tensor) -> Tensor:
        """The relative error of the held-out output."""
        return torch.tensor(output_error(self.unseen, self.M, W.detach().mT))


def register(smoke: bool) -> dict[str, Place]:
    """Register the problems in `learn` and `curves`; with `smoke`, those of a small transformer."""
    learn.METHODS.update(METHODS)
    places = {}
    for name, place in PLACES.items():
        # The small model has twelfths and twenty-fourths of these sizes.
        n, steps = ({384: 32, 1536: 64}[place.n], 6) if smoke else (place.n, place.steps)
        places[name] = place._replace(n=n, steps=steps)
        make = functools.partial(Activations, place, smoke)
        learn.PROBLEMS[name] = (make, {n: steps})  # type: ignore[assignment]
        curves.UNITS[name] = "part of the output lost"
    return places


def select_methods(name: str, methods: list[str]) -> list[str]:
    """All methods for the main problems; GCD only for other losses and lengths."""
    return ["gcd"] if " by " in name else methods


def train(run: learn.Run) -> Future[dict[str, Any]]:
    """Train at once; returns a finished future."""
    future: Future[dict[str, Any]] = Future()
    future.set_result(learn.train(run))
    return future


def time_steps(name: str, n: int, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Median processor time of a training step, the methods taking turns."""
    steps = {m: learn.make_timed_step(name, n, m, lr, "cpu") for m, lr in rates.items()}
    times: dict[str, list[float]] = {method: [] for method in rates}
    for turn in range(ROUNDS + 1):
        for method, step in steps.items():
            began = time.process_time()
            step()
            # The first compiles.
            times[method] += [time.process_time() - began] if turn else []
    for method, found in times.items():
        yield {
            **{"problem": name, "n": n, "method": method, "lr": rates[method]},
            "median_us": round(statistics.median(found) * 1e6, 1),
            "samples": len(found),
            "timed_by": "processor time",
            **learn.describe("cpu"),
        }


def format_tables(found: rows.Rows, times: rows.Rows) -> str:
    """A Markdown table for each layer, and one for the losses of GCD."""
    lines, losses = [], []
    for (name, n), methods in curves.gather(found, times).items():
        if " by " in name:
            losses.append(
                f"| {name.partition(' by ')[2]} | {format_figures(methods['gcd'].figures)} |"
            )
            continue
        if name == "attention":
            losses.append(f"| peak | {format_figures(methods['gcd'].figures)} |")
        # The time of the fastest method.
        budget = min(total_ms(result) for result in methods.values())
        steps, start = next(iter(methods.values())).steps, next(iter(methods.values())).curve[0]
        lines += [f"\n**{TITLES[name]}, n = {n}**\n"]
        lines += [
            f"| method | lost after {steps} steps | after {budget / 1e3:.2g} s | ms a step | "
        ]
        lines[-1] += "ms to Cayley's | rate | off SO(n) |"
        lines += ["|---" * 7 + "|", f"| frozen | {start:.2%} | {start:.2%} | 0 | – | – | – |"]
        for method, result in sorted(methods.items(), key=lambda item: item[1].mean):
            at = curves.points(steps)
            known = [k for k, step in enumerate(at) if step <= budget / total_ms(result) * steps]
            reach = curves.time_to_reach(result, methods["cayley"].mean)
            lines += [
                f"| {method} | {format_figures(result.figures)} | {result.curve[known[-1]]:.2%} "
                f"| {total_ms(result) / steps:.3g} | {'–' if reach is None else f'{reach:.0f}'} "
                f"| {result.lr:g} | {result.orthogonality_error:.0e} |"
            ]
    if len(losses) > 1:
        lines += ["", "| the loss that `gcd` lowers | lost |", "|---|---|", *losses]
    return "\n".join(lines).strip()


def plot(found: rows.Rows, times: rows.Rows, path: Path) -> None:
    """Draw the held-out error against time, with a panel for each layer."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    gathered = curves.gather(found, times)
    results = {key: methods for key, methods in gathered.items() if " by " not in key[0]}
    size = (4.8 * len(results), 3.6)
    figure, panels = pyplot.subplots(1, len(results), figsize=size, squeeze=False)
    for axes, ((name, n), methods) in zip(panels[0], results.items(), strict=True):
        start = 100 * next(iter(methods.values())).curve[0]
        axes.axhline(start, color="#808080", lw=1, ls=":", label="frozen")
        drawn = [(method, result, curves.STYLES[method]) for method, result in methods.items()]
        if name == "attention" and (LONGER, n) in gathered:
            longer = gathered[LONGER, n]["gcd"]._replace(median_us=methods["gcd"].median_us)
            drawn.append((f"gcd, {longer.steps} steps", longer, {"color": "#c1121f", "ls": ":"}))
        for label, result, style in drawn:
            share = total_ms(result) / 1e3 / result.steps
            at = [step * share for step in curves.points(result.steps)]
            axes.plot(at, [100 * y for y in result.curve], label=label, **style)
        least = min(result.curve[-1] for result in methods.values())
        # Some curves jump far up in the first steps.
        axes.set_ylim(95 * least, 1.05 * start)
        axes.set_title(f"{TITLES[name]}, n = {n}", fontsize=10)
        axes.set_xlabel("seconds of training", fontsize=9)
        axes.set_ylabel("% of the output lost to 4 bits", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    panels[0][0].legend(frameon=False, fontsize=8, ncols=2)
    row = times[0]
    where = f"{row['threads']} thread of an {row['cpu']}, torch {row['torch']}"
    caption = f"Held-out error against processor time, {where}."
    rows.save_picture(pyplot, figure, caption, path)


def format_figures(figures: list[float]) -> str:
    """Mean and standard deviation in percent."""
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return f"{statistics.fmean(figures):.3%} ± {100 * spread:.3f}"


def total_ms(result: curves.Result) -> float:
    """Milliseconds of all steps."""
    if result.median_us is None:
        raise SystemExit("--time has to be run first")
    return result.steps * result.median_us / 1e3


def main() -> None:
    """Run, time, print or draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default=",".join(PLACES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=5, help="number of shown seeds")
    parser.add_argument("--json", type=Path, required=True, help="rows of the runs")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows and run what is missing"
    )
    parser.add_argument("--smoke", action="store_true", help="a small random transformer")
    parser.add_argument("--time", action="store_true", help="time the steps of the methods in rows")
    parser.add_argument("--time-json", type=Path, help="rows of the times")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    parser.add_argument("--plot", type=Path, help="draw the rows")
    given = parser.parse_args()
    places = register(given.smoke)
    wanted = [name for name in places if name in given.problems.split(",")]
    if not (given.time or given.table or given.plot):
        done = rows.read(given.json) if given.resume and given.json.exists() else []
        for name in wanted:
            n, steps = places[name].n, places[name].steps
            searches = []
            for method in select_methods(name, given.methods.split(",")):
                search = learn.Search(name, n, method, steps, given.seeds, given.smoke)
                search.hidden = search.hidden[: places[name].hidden_seeds]
                searches.append(search)
            for row in learn.learn_all(searches, done, train):
                told = row["failure"] or f"{row['figure']:.5f}"
                print("{problem} {method} lr {lr:g} seed {seed}".format(**row), told, flush=True)
                done.append(row)
                rows.write(given.json, done)
        return
    found = rows.read(given.json)
    if given.time:
        times = []
        for (name, n), rates in learn.select_rates(found).items():
            for row in time_steps(name, n, rates):
                print("{problem} {method:12} {median_us:10.1f} µs".format(**row))
                times.append(row)
        rows.write(given.time_json, times)
    times = rows.read(given.time_json) if given.time_json else []
    if given.table:
        print(format_tables(found, times))
    if given.plot:
        plot(found, times, given.plot)


if __name__ == "__main__":
    main()
