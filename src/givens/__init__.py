"""Learn rotation matrices by Givens coordinate descent, and train embedding indexes end to end."""

from givens import baselines, kernels, pairing
from givens.fixed.fit import fit
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

__version__ = "0.1.0"

__all__ = [
    "GCD",
    "Codes",
    "IndexLayer",
    "Quantizer",
    "Rotation",
    "baselines",
    "fit",
    "greedy_pairs",
    "ground_truth",
    "kernels",
    "load",
    "orthogonality_error",
    "pairing",
    "project",
    "random_pairs",
    "random_rotation",
    "recall",
    "rotate_pairs_",
    "skew_gradient",
    "steepest_pairs",
]
