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
