# SPDX-License-Identifier: Apache-2.0
"""Training of a replaced model in two processes: DistributedDataParallel, and fully_shard; on the
CPU over Gloo, on two GPUs over NCCL."""

import pytest
from support.ranks import ON_TWO_GPUS, run_two_ranks

pytestmark = pytest.mark.torch

PROGRAM = """
import copy, sys
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from support.tiny_models import make, tokens
import tiercel.integrations.transformers as door
from tiercel.integrations.transformers import layers, projections

torch.set_num_threads(1)
rank, kind, tied, device = int(sys.argv[1]), sys.argv[3], sys.argv[4] == "tied", sys.argv[5]
backend = "gloo"
if device == "cuda":
    backend = "nccl"
    torch.cuda.set_device(rank)
dist.init_process_group(backend, init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
layers._LEAST_ROWS = projections._LEAST_ROWS = 1

def step(model, ids):
    model(ids, labels=ids, use_cache=False).loss.backward()

model = make("Qwen3", tie_word_embeddings=tied).to(device).train()
alone = copy.deepcopy(model)
report = door.apply(model)
door.apply(alone)
assert {"decoder layer", "embedding", "linear_cross_entropy"} <= set(report.replaced)
halves = tokens(batch=4).to(device).chunk(2)
# Two backward passes: gradients add up.
for _ in range(2):
    for half in halves:
        (alone(half, labels=half, use_cache=False).loss / 2).backward()
if kind == "ddp":
    wrapped = DistributedDataParallel(model)
    with wrapped.no_sync():
        step(wrapped, halves[rank])
    step(wrapped, halves[rank])
else:
    mesh = init_device_mesh(device, (2,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    step(model, halves[rank])
    step(model, halves[rank])
for (name, mine), due in zip(model.named_parameters(), alone.parameters(), strict=True):
    grad = mine.grad.full_tensor() if kind == "fsdp" else mine.grad
    error = (grad.float() - due.grad.float()).norm()
    assert error <= 0.02 * due.grad.float().norm(), (name, error)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("weights", ["tied", "apart"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_TWO_GPUS)])
def test_two_ranks(device, kind, weights, tmp_path):
    run_two_ranks(PROGRAM, tmp_path / "meeting", kind, weights, device)
