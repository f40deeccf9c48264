"""Retrieval losses over candidates that a batch shares.

s_bc = ⟨user b, candidate c⟩, a cosine in full precision; t_b the column of the target of row b.
Among ranks, which have as many rows each, a loss is this one's share of the mean over all rows.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from givens import distributed


def softmax_loss(
    users: Float[Tensor, "b n"],
    items: Float[Tensor, "c n"],
    target: Int[Tensor, " b"],
    *,
    temperature: float = 0.07,
    log_q: Float[Tensor, " c"] | None = None,
    same: Bool[Tensor, "b c"] | None = None,
) -> Float[Tensor, ""]:
    """−log of the target's share in Σ_c exp(s_bc/τ − log q_c), the mean over rows.

    Args:
        users: of the rows.
        items: the candidates.
        target: the column of the target.
        temperature: τ.
        log_q: log of how often each candidate is drawn: popular items come often, and would be
            pushed away for it.
        same: where a candidate is the row's target; once more, it does not count against it.
    """
    # Divided where it is small.
    logits = (users / temperature) @ items.mT
    if log_q is not None:
        logits = logits - log_q
    if same is not None:
        again = same.scatter(1, target[:, None], False)
        logits = logits.masked_fill(again, -torch.inf)
    mean = functional.cross_entropy(logits, target)
    return distributed.share(mean, 1, distributed.count())


def hinge_loss(
    users: Float[Tensor, "b n"],
    items: Float[Tensor, "c n"],
    target: Int[Tensor, " b"],
    *,
    margin: float = 0.1,
    same: Bool[Tensor, "b c"] | None = None,
) -> Float[Tensor, ""]:
    """max(0, margin − s_bt + s_bc) over candidates c other than the target, the mean of all."""
    scores = users @ items.mT
    loss = functional.relu(margin - scores.gather(1, target[:, None]) + scores)
    if same is None:
        same = torch.zeros_like(scores, dtype=torch.bool)
    other = ~same.scatter(1, target[:, None], True)
    return (loss * other).sum() / distributed.sum_ranks(other.sum()).clamp_min(1)
