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


# Three children of the root, two of the first, one of the second.
PARENTS = (-1, -1, -1, 0, 0, 1)


def _siblings(q, draws, count, replacement, generator):
    """Tokens of a node's children, and the distributions that each was drawn from."""
    rows = q.expand(draws, -1)
    if replacement:
        tokens = torch.multinomial(rows, count, replacement=True, generator=generator)
        return tokens, [rows] * count
    tokens, probs = [], []
    for _ in range(count):
        probs.append(rows / rows.sum(-1, keepdim=True))
        tokens.append(torch.multinomial(probs[-1], 1, generator=generator))
        rows = rows.scatter(1, tokens[-1], 0.0)
    return torch.cat(tokens, 1), probs


def assert_tree_lossless(
    draws, *, certain=False, replacement=True, device="cpu", dtype=torch.float32, **given
):
    """Trees of six nodes from other distributions: behind each node, tokens are the target's."""
    columns, generator = 9, torch.Generator().manual_seed(6)
    target = (1.3 * torch.randn(7, columns, generator=generator)).to(dtype)
    other = torch.softmax(target.double() + torch.randn(7, columns, generator=generator), -1)
    draft, probs = torch.empty(draws, 6, dtype=torch.int64), [None] * 6
    for parent in (-1, 0, 1):
        children = [node for node in range(6) if PARENTS[node] == parent]
        made = _siblings(other[parent + 1], draws, len(children), replacement, generator)
        draft[:, children] = made[0]
        for node, q in zip(children, made[1], strict=True):
            probs[node] = q
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | given
    each = {name: torch.tensor([value] * 7) for name, value in options.items()}
    weights = kept_weights(target.float(), **each)
    p = weights / weights.sum(-1, keepdim=True)
    q = None if certain else torch.stack(probs, 1).float().contiguous().to(device)
    parents = torch.tensor(PARENTS, dtype=torch.int32).expand(draws, -1).contiguous()
    tokens, accepted, path = tiercel.verify_draft(
        draft.to(device),
        target.expand(draws, -1, -1).contiguous().to(device),
        q,
        parents=parents.to(device),
        seed=torch.full((draws,), 1234, device=device),
        offset=torch.arange(draws, device=device) * 7,
        **given,
    )
    tokens, accepted, path = tokens.cpu(), accepted.cpu(), path.cpu()
    near(torch.bincount(tokens[:, 0], minlength=columns).double(), draws * p[0])
    for node, depth in ((0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)):
        there = path[:, depth - 1] == node
        found = torch.bincount(tokens[there, depth], minlength=columns).double()
        near(found, int(there.sum()) * p[node + 1])
        assert (draft[there, node] == tokens[there, depth - 1]).all()
    one = float((p[0] * other[0] if certain else torch.minimum(p[0], other[0])).sum())
    assert float((accepted > 0).double().mean()) > one + 0.02  # more than with one child
