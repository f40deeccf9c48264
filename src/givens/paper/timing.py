"""The time of a step: replays of a CUDA graph, CUDA events, or the host's clock."""

import time
from collections.abc import Callable
from typing import Any

import torch

SECONDS_A_ROUND = 0.15


def capture(step: Callable[[], Any], count: int = 20) -> tuple[Callable[[], Any], int]:
    """Record a CUDA graph of `count` steps; returns its replay and their number."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # A step on one stream must see what the step before it did on the other.
    side.wait_stream(current)
    with torch.cuda.stream(side):
        step()
        step()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            step()

    def replay(_holder: Callable[[], Any] = step) -> None:
        # A graph holds only addresses, so its tensors must outlive it.
        graph.replay()

    return replay, count


def time_by_events(step: Callable[[], Any], count: int) -> list[float]:
    """Seconds of single steps on the device, by CUDA events."""
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 9 or time.perf_counter() - began < SECONDS_A_ROUND:
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        first.record()
        step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / count)
        if time.perf_counter() - began > 10 * SECONDS_A_ROUND:
            break
    return times


def time_by_clock(
    step: Callable[[], Any], _: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of single steps on the host."""
    times = []
    began = clock()
    # The first step finds the caches as other methods left them; it counts only if there is no
    # time for another.
    step()
    if clock() - began > SECONDS_A_ROUND:
        return [clock() - began]
    while clock() - began < SECONDS_A_ROUND:
        start = clock()
        step()
        times.append(clock() - start)
    return times
