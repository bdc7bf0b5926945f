# SPDX-License-Identifier: Apache-2.0
"""moe_align_block_size by the definition, in Python, and by sorting, for results on a GPU."""

import torch


def slots_for(numel, experts, block_size, pad=False):
    slots = numel + experts * (block_size - 1)
    if pad:
        slots = -(-slots // block_size) * block_size
    return min(numel * block_size, slots) if numel < experts else slots


def by_definition(ids, block_size, experts, expert_map=None, pad=False, ignore=False):
    """(slots, blocks, number) as lists."""
    ids = [e if 0 <= e < experts else None for e in ids.flatten().tolist()]
    here = expert_map.tolist() if expert_map is not None else None
    if ignore and here is not None:
        mapped = [None if e is None else here[e] for e in ids]
        ids = [e if e is not None and 0 <= e < experts else None for e in mapped]
    slots, blocks = [], []
    for expert in range(experts):
        mine = [i for i, e in enumerate(ids) if e == expert]
        count = -(-len(mine) // block_size)
        slots += mine + [len(ids)] * (count * block_size - len(mine))
        blocks += [here[expert] if here is not None and not ignore else expert] * count
    number = len(slots)
    total = slots_for(len(ids), experts, block_size, pad)
    slots += [len(ids)] * (total - number)
    blocks += [-1] * (-(-total // block_size) - len(blocks))
    return slots, blocks, [number]


def by_sorting(ids, block_size, experts):
    """The same as tensors, for valid ids without a map."""
    ids = ids.flatten().long()
    numel, device = ids.numel(), ids.device
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=experts)
    blocks = (counts + block_size - 1) // block_size
    starts = (blocks.cumsum(0) - blocks) * block_size
    rank = torch.arange(numel, device=device) - (counts.cumsum(0) - counts)[ids[order]]
    total = slots_for(numel, experts, block_size)
    slots = torch.full((total,), numel, dtype=torch.int32, device=device)
    slots[starts[ids[order]] + rank] = order.int()
    expert_ids = torch.full((-(-total // block_size),), -1, dtype=torch.int32, device=device)
    used = torch.repeat_interleave(torch.arange(experts, device=device), blocks)
    expert_ids[: len(used)] = used.int()
    return slots, expert_ids, (blocks.sum() * block_size).int().reshape(1)


def random_ids(tokens, experts, k, dtype=torch.int32, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    keys = torch.rand(tokens, experts, device=device, generator=generator)
    return keys.topk(k).indices.to(dtype)


def every_second(experts, device="cpu"):
    """A map for a device that has every second expert."""
    here = torch.full((experts,), -1, dtype=torch.int32)
    here[1::2] = torch.arange(len(here[1::2]), dtype=torch.int32)
    return here.to(device)
