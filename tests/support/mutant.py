# SPDX-License-Identifier: Apache-2.0
"""Runs linear_act from a changed PTX file, in a process of its own: PTX is read once in one."""

import os

import torch
from support.emulator import kernels, options

# A ring of TMA tiles, wgmma, and a sum over a cluster's shared memory.
KERNEL = "linear_act_bf16_none_64x32_split_k"
M, N, K = 20, 72, 8200


def multiply(folder, answer):
    """Sends "right", "wrong" or an error's text."""
    os.environ["TIERCEL_EMULATOR_PTX"] = folder
    torch.manual_seed(0)
    x, w = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    truth = x.float() @ w.float().T
    result = "right"
    for seed in range(4):
        y = torch.zeros(M, N).bfloat16()
        try:
            assert kernels.linear_act_plan(x, w, None, None, y, None, 0)["kernel"] == KERNEL
            with options(seed=seed):
                kernels.linear_act(x, w, None, None, y, None, 0)
        except Exception as error:
            result = str(error)
            break
        if not ((y - truth).abs() <= 0.004 * truth.abs() + 0.01).all():
            result = "wrong"
            break
    answer.send(result)
