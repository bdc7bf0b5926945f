# SPDX-License-Identifier: Apache-2.0
"""Statistical tests of speculative verification, for any device."""

import torch

import tiercel
from tiercel.ops.sampling.reference import kept_weights


def near(counts, expected):
    """Chi-square: five standard deviations; what cannot occur does not."""
    possible = expected > 0
    assert not counts[~possible].any()
    freedom = int(possible.sum()) - 1
    statistic = float(((counts - expected)[possible].square() / expected[possible]).sum())
    assert statistic < freedom + 5 * max(2 * freedom, 1) ** 0.5, statistic


def assert_lossless(draws, *, certain, device="cpu", dtype=torch.float32, columns=9, **given):
    """Drafts of three tokens from another distribution: tokens at each position, as often as they
    exist, are distributed as the target's, and as many are accepted as can be."""
    generator = torch.Generator().manual_seed(5)
    target = (1.3 * torch.randn(4, columns, generator=generator)).to(dtype)
    other = target[:3].double() + torch.randn(3, columns, generator=generator)
    q = torch.softmax(other, -1)
    draft = torch.stack(
        [torch.multinomial(row, draws, replacement=True, generator=generator) for row in q], 1
    )
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    each = {name: torch.tensor([value] * 4) for name, value in options.items()}
    weights = kept_weights(target.float(), **each)
    p = weights / weights.sum(-1, keepdim=True)
    probs = None if certain else q.float().expand(draws, -1, -1).contiguous().to(device)
    tokens, accepted = tiercel.verify_draft(
        draft.to(device),
        target.expand(draws, -1, -1).contiguous().to(device),
        probs,
        seed=torch.full((draws,), 1234, device=device),
        offset=torch.arange(draws, device=device) * 4,
        **given,
    )
    tokens, accepted = tokens.cpu(), accepted.cpu()
    existing = draws
    for i in range(4):
        there = accepted >= i
        assert (tokens[~there, i] == -1).all()
        found = torch.bincount(tokens[there, i], minlength=columns).double()
        near(found, int(there.sum()) * p[i])
        if i < 3:
            # A certain draft is one token; over all drafts it is right with probability sum(p q).
            rate = float((p[i] * q[i] if certain else torch.minimum(p[i], q[i])).sum())
            number = int((accepted > i).sum())
            spread = (existing * rate * (1 - rate)) ** 0.5
            assert abs(number - existing * rate) < 5 * spread + 1e-6 * draws + 1
            existing = number
    # Neighbouring positions are independent.
    both = accepted >= 1
    pairs = torch.bincount(tokens[both, 0] * columns + tokens[both, 1], minlength=columns**2)
    first = torch.bincount(tokens[both, 0], minlength=columns).double()
    near(pairs.double(), (first[:, None] * p[1]).flatten())
