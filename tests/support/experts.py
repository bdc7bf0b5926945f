# SPDX-License-Identifier: Apache-2.0
"""Operands of expert MLPs."""

import torch


def expert_data(tokens, experts, k, hidden, inner, dtype=torch.bfloat16, everywhere=None):
    """(x, w_up, w_down, topk_weights, topk_ids); ids are below `everywhere`, if that is given."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    ids = torch.rand(tokens, everywhere or experts, generator=generator).topk(k).indices.int()
    return (
        random(tokens, hidden),
        random(experts, 2 * inner, hidden, scale=hidden**-0.5),
        random(experts, hidden, inner, scale=inner**-0.5),
        torch.rand(tokens, k, generator=generator),
        ids,
    )
