"""Retrieval losses over candidates that a batch shares.

s_bc = ⟨user b, candidate c⟩ is a cosine; t_b the column of the target of row b.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F


def softmax_loss(
    scores: Float[Tensor, "b c"],
    target: Int[Tensor, " b"],
    *,
    temperature: float = 0.07,
    log_q: Float[Tensor, " c"] | None = None,
    same: Bool[Tensor, "b c"] | None = None,
) -> Float[Tensor, ""]:
    """−log of the target's share in Σ_c exp(s_bc/τ − log q_c), the mean over rows.

    Args:
        scores: of the candidates.
        target: the column of the target.
        temperature: τ.
        log_q: log of how likely each candidate was drawn: popular items are drawn often, and would
            be pushed away for it.
        same: where a candidate is the row's target once more, and does not count against it.
    """
    logits = scores / temperature
    if log_q is not None:
        logits = logits - log_q
    if same is not None:
        logits = logits.masked_fill(_others(same, target), -torch.inf)
    return F.cross_entropy(logits, target)


def hinge_loss(
    scores: Float[Tensor, "b c"],
    target: Int[Tensor, " b"],
    *,
    margin: float = 0.1,
    same: Bool[Tensor, "b c"] | None = None,
) -> Float[Tensor, ""]:
    """max(0, margin − s_bt + s_bc) over the other candidates c, the mean over all that count."""
    positive = scores.gather(1, target[:, None])
    loss = F.relu(margin - positive + scores)
    counts = torch.ones_like(scores, dtype=torch.bool).scatter(1, target[:, None], False)
    if same is not None:
        counts &= ~same
    return (loss * counts).sum() / counts.sum().clamp_min(1)


def _others(same: Tensor, target: Tensor) -> Tensor:
    return same.scatter(1, target[:, None], False)
