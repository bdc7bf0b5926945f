# SPDX-License-Identifier: Apache-2.0
"""topk_softmax in float64 by the plainest means, for results that are compared on a GPU."""

import torch

# float32 arithmetic against float64: the exponential's argument is rounded once (2**-24 of up to 80
# at the ends of the range), the exponential twice, sum and quotient a few times more.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-7}


def topk_softmax(scores, k, softmax_first=True, renormalize=False):
    """(weights float64, indices int64); the indices need scores without NaN."""
    wide = scores.double()
    # A stable descending sort keeps ties in index order; adding 0.0 makes -0.0 the same as 0.0.
    order = torch.sort(wide + 0.0, dim=-1, descending=True, stable=True).indices[:, :k]
    if softmax_first:
        weights = torch.softmax(wide, -1).gather(-1, order)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    else:
        weights = torch.softmax(wide.gather(-1, order), -1)
    return weights, order


def assert_right(result, scores, k, softmax_first=True, renormalize=False):
    weights, indices = result
    true_weights, true_indices = topk_softmax(scores, k, softmax_first, renormalize)
    assert torch.equal(indices.long(), true_indices)
    torch.testing.assert_close(weights.double(), true_weights, **TOLERANCE, equal_nan=True)


def scored(scores, scoring):
    """The function of scores, in float64."""
    wide = scores.double()
    if scoring == "softmax":
        return torch.softmax(wide, -1)
    return torch.sigmoid(wide) if scoring == "sigmoid" else wide.exp().log1p().sqrt()


def selected(
    scores,
    weights,
    indices,
    *,
    scoring="softmax",
    bias=None,
    n_group=1,
    topk_group=1,
    renormalize=False,
    scaling_factor=1.0,
):
    """Asserts that in float64 none that were left out are better, by more than a rounding, and that
    the weights are right. Scores are finite."""
    values = scored(scores, scoring)
    by = values if bias is None else values + bias.double()
    indices = indices.long()
    rows, experts = by.shape
    groups = by.view(rows, n_group, -1)
    best = groups.sort(-1, descending=True).values[..., : 1 if bias is None else 2].sum(-1)
    taken = torch.zeros(rows, experts, dtype=torch.bool, device=by.device).scatter(1, indices, True)
    assert (taken.sum(-1) == indices.shape[1]).all()
    # Groups that are surely in, or surely out.
    slack = 2e-6
    edge = best.sort(-1, descending=True).values[:, topk_group - 1, None]
    beyond = best.sort(-1, descending=True).values[:, topk_group:][:, :1]
    size = experts // n_group
    out = (best < edge - slack).repeat_interleave(size, 1)
    assert not (taken & out).any()
    inside = (
        torch.ones_like(out)
        if topk_group == n_group
        else (best > beyond + slack).repeat_interleave(size, 1)
    )
    least = torch.where(taken, by, torch.inf).amin(-1, keepdim=True)
    assert not (inside & ~taken & (by > least + slack)).any()
    chosen = by.gather(1, indices)
    assert (chosen[:, 1:] <= chosen[:, :-1] + slack).all()
    due = values.gather(1, indices)
    if renormalize:
        due = due / due.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), scaling_factor * due, **TOLERANCE)
