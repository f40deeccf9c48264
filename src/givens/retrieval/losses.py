"""Retrieval losses over candidates that a batch shares.

s_bc = ⟨user b, candidate c⟩, a cosine in full precision; t_b is the column of the target of row b.
Ranks have equal numbers of rows; a loss is this rank's share of the mean over all rows.
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
    """−log of the target's share in Σ_c exp(s_bc/τ − log q_c), averaged over rows.

    Args:
        users: the user of each row.
        items: the candidates.
        target: the column of each row's target.
        temperature: τ.
        log_q: log of the expected count of each candidate, which corrects for the frequent draws of
            popular items.
        same: where a candidate is the row's target; its duplicates do not count as negatives.
    """
    # The users are the smaller factor.
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
    """The mean of max(0, margin − s_bt + s_bc) over all candidates c that are not the target."""
    scores = users @ items.mT
    loss = functional.relu(margin - scores.gather(1, target[:, None]) + scores)
    if same is None:
        same = torch.zeros_like(scores, dtype=torch.bool)
    other = ~same.scatter(1, target[:, None], True)
    return (loss * other).sum() / distributed.sum_ranks(other.sum()).clamp_min(1)
