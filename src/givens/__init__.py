"""Learn rotation matrices by Givens coordinate descent, and train embedding indexes end to end."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from givens.fixed.fit import fit
    from givens.kernels import backend
    from givens.layer.layer import IndexLayer
    from givens.optim import GCD
    from givens.pairing import greedy_pairs, random_pairs, steepest_pairs
    from givens.quantizer import Codes, Quantizer, load
    from givens.rotation import (
        Rotation,
        orthogonality_error,
        project,
        random_rotation,
        rotate_pairs_,
        skew_gradient,
    )
    from givens.search import ground_truth, recall

# Imported at first use: importing torch takes seconds, during which Ctrl-C must still work.
_PLACES = {
    "fixed.fit": ("fit",),
    "kernels": ("backend",),
    "layer.layer": ("IndexLayer",),
    "optim": ("GCD",),
    "pairing": ("greedy_pairs", "random_pairs", "steepest_pairs"),
    "quantizer": ("Codes", "Quantizer", "load"),
    "rotation": (
        "Rotation",
        "orthogonality_error",
        "project",
        "random_rotation",
        "rotate_pairs_",
        "skew_gradient",
    ),
    "search": ("ground_truth", "recall"),
}

__version__ = "0.1.0"

__all__ = [
    "GCD",
    "Codes",
    "IndexLayer",
    "Quantizer",
    "Rotation",
    "backend",
    "fit",
    "greedy_pairs",
    "ground_truth",
    "load",
    "orthogonality_error",
    "project",
    "random_pairs",
    "random_rotation",
    "recall",
    "rotate_pairs_",
    "skew_gradient",
    "steepest_pairs",
]


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            value = getattr(importlib.import_module(f"givens.{place}"), name)
            globals()[name] = value
            return value
    if not name.startswith("_") and importlib.util.find_spec(f"givens.{name}"):
        return importlib.import_module(f"givens.{name}")
    raise AttributeError(f"module 'givens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
