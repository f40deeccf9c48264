"""A step as one CUDA graph: on a GPU its launches take longer than their work."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# Calls before the recording: optimizers make their states, and kernels are compiled.
PLAIN = 3

# A graph, its input buffers, and its output.
Recorded = tuple[torch.cuda.CUDAGraph, list[Tensor | None], Tensor]


class Replay:
    """Calls a function of tensors: plainly at first, then recorded once, then replayed.

    The function returns one tensor without synchronising. Every call must pass the same function;
    storing it here could create a reference cycle. Shapes must not change.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls = 0
        self.stream = torch.cuda.Stream(device)
        self.recorded: Recorded | None = None

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        """The function's result for the inputs."""
        with torch.cuda.device(self.device):
            return self._called(function, inputs)

    def _called(self, function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]) -> Tensor:
        self.calls += 1
        if self.calls <= PLAIN:
            return self._plainly(function, inputs)
        if self.recorded is None:
            self.recorded = self._record(function, inputs)
        graph, places, output = self.recorded
        for place, new in zip(places, inputs, strict=True):
            if place is not None and new is not None:
                place.copy_(new)
        graph.replay()
        return output.clone()

    def _plainly(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]
    ) -> Tensor:
        # On the stream of the recording: autograd accumulates a gradient where it was first made.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            output = function(*inputs)
        current.wait_stream(self.stream)
        return output

    def _record(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...]
    ) -> Recorded:
        places = [None if part is None else part.clone() for part in inputs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            output = function(*places)
        return graph, places, output


def record(W: Tensor, once: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """`fixed.turns.record`: work on W, to be called step by step."""
    again = Replay(W.device)
    return lambda step: again(partial(once, step))
