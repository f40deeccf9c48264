"""Charts as SVG, in the page's colours, so that they follow light and dark mode.

Values that `format` puts into markup are escaped unless they are markup themselves.
"""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from markupsafe import Markup
from torch import Tensor

# Small, so that text is legible even on a phone.
WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 44
# The most cells of a heat map; of a larger matrix, each cell is the maximum of a block.
PIXELS = 128
HEAT = (224, 92, 48)


@dataclass(frozen=True)
class Series:
    """A series in one colour: points, optionally joined by a line."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    line: bool = True
    dashed: bool = False
    hollow: bool = False
    value: str = ""
    """A number that is shown beside its name."""
    notes: Sequence[str] = ()
    """A word beside each point."""


@dataclass(frozen=True)
class Axis:
    """An axis: its name, its scale, and the format of its numbers."""

    name: str
    log: bool = False
    write: Callable[[float], str] = lambda value: f"{value:,.4g}"
    zero: bool = False
    """Whether it begins at 0."""


def chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    alt: str,
) -> Markup:
    """A chart of lines and points, with a tooltip for each point.

    Args:
        series: the lines and points.
        x: the horizontal axis.
        y: the vertical axis.
        alt: the alternative text.
    """
    xs = [at for one in series for at, _ in one.points]
    ys = [value for one in series for _, value in one.points]
    across, up = Scale(xs, x, LEFT, WIDTH - RIGHT), Scale(ys, y, HEIGHT - BOTTOM, TOP)
    left, right, below = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, alt),
        *(
            Markup(
                '<path class="grid" d="M{} {:.1f}H{}"/>'
                '<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>'
            ).format(left, up(value), right, left - 7, up(value) + 4, y.write(value))
            for value in up.ticks
        ),
        *(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(
                across(value), below + 17, x.write(value)
            )
            for value in across.ticks
        ),
        Markup('<path class="axis" d="M{} {}H{}"/>').format(left, below, right),
        Markup('<text class="name" x="{}" y="{}" text-anchor="end">{} →</text>').format(
            right, HEIGHT - 6, x.name
        ),
        Markup('<text class="name" x="0" y="14">↑ {}</text>').format(y.name),
    ]
    for one in series:
        parts.append(_draw_series(one, across, up, x, y))
    return Markup("").join([*parts, Markup("</svg>")])


def heat_map(M: Float[Tensor, "n n"], most: float, *, alt: str) -> Markup:
    """A heat map of entries from 0 to `most`, on a square-root scale."""
    block = -(-len(M) // PIXELS)
    if block > 1:
        M = torch.nn.functional.max_pool2d(M[None], block, ceil_mode=True)[0]
    alpha = (255 * (M / most).clamp(0, 1).sqrt()).round().to(torch.uint8)
    side = len(M)
    colour = bytes(HEAT)
    rows = (b"\0" + b"".join(colour + bytes((a,)) for a in row) for row in alpha.tolist())
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 9)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    source = base64.b64encode(png).decode()
    return Markup('<img class="heat" alt="{}" src="data:image/png;base64,{}">').format(alt, source)


class Scale:
    """Maps values to positions in the picture, with round numbers as ticks."""

    def __init__(self, values: Sequence[float], axis: Axis, first: float, last: float) -> None:
        self.log, self.first, self.last = axis.log, first, last
        low, high = min(values), max(values)
        if axis.log:
            # 0 has no position on a logarithmic scale.
            low = min((value for value in values if value > 0), default=1e-9)
            high = max(high, low)
            low, high = low / 1.15, high * 1.15
            self.ticks = log_ticks(low, high)
        else:
            low = min(low, 0.0) if axis.zero else low
            room = (high - low or abs(high) or 1.0) * 0.05
            low, high = (low if axis.zero and low == 0 else low - room), high + room
            self.ticks = round_ticks(low, high)
        self.low, self.high = self._place(low), self._place(high)

    def _place(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        """The position of a value."""
        part = (self._place(value) - self.low) / (self.high - self.low)
        return self.first + part * (self.last - self.first)

    def shows(self, value: float) -> bool:
        """Whether a value has a position."""
        return math.isfinite(value) and (not self.log or value > 0)


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= count)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or of two for a short range."""
    base, most = (2, 7) if high / low < 100 else (10, 6)
    first, last = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
    every = -(-(last - first + 1) // most) or 1
    ticks = [float(base) ** power for power in range(first, last + 1, every)]
    return ticks if len(ticks) > 1 else round_ticks(low, high, 4)


def _draw_series(one: Series, across: Scale, up: Scale, x: Axis, y: Axis) -> Markup:
    shown = [
        (across(at), up(value), at, value)
        for at, value in one.points
        if across.shows(at) and up.shows(value)
    ]
    parts = [Markup('<g class="s{}">').format(one.colour)]
    if one.line and len(shown) > 1:
        path = "L".join(f"{px:.1f} {py:.1f}" for px, py, _, _ in shown)
        style = "line dashed" if one.dashed else "line"
        parts.append(Markup('<path class="{}" d="M{}"/>').format(style, path))
    # Small markers on a line of many points.
    radius = 4.5 if not one.line else 2.6 if len(shown) <= 40 else 1.2
    style = Markup(' class="hollow"') if one.hollow else ""
    for number, (px, py, at, value) in enumerate(shown):
        told = f"{one.name}: {x.name} {x.write(at)}, {y.name} {y.write(value)}"
        parts.append(
            Markup('<circle{} cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
                style, px, py, radius, told
            )
        )
        if one.notes:
            anchor, beside = ("end", -8) if px > WIDTH / 2 else ("start", 8)
            note = Markup('<text class="note" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
            parts.append(note.format(px + beside, py - 7, anchor, one.notes[number]))
    return Markup("").join([*parts, Markup("</g>")])
