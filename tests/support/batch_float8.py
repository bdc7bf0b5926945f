# SPDX-License-Identifier: Apache-2.0
"""The cases of batch_rows.py for what trains with float8."""

import torch
from support.batch_rows import Rows, case

import tiercel


@case("fp8_linear_training")
def fp8_linear_training(source):
    x, weight = source.normal(2500, 4096), source.normal(1024, 4096, factor=0.02)
    return Rows(2500, lambda rows: (tiercel.fp8_linear_training(x[rows], weight),))


@case("fp8_linear_weight_grad")
def fp8_linear_weight_grad(source):
    """Rows are those of the weight: any number is summed over the same tokens."""
    grad, x = source.normal(1000, 2504), source.normal(1000, 1024)
    (*_, grad_t, grad_scale), (*_, x_t, x_scale) = map(tiercel.fp8_quantize_transpose, (grad, x))

    def run(rows):
        given = grad_t.view(torch.uint8)[rows].view(grad_t.dtype), x_t
        return (tiercel.fp8_linear_weight_grad(*given, grad_scale[:, rows], x_scale),)

    return Rows(2504, run)


@case("fp8_quantize_transpose")
def fp8_quantize_transpose(source):
    """Scales of the transpose are of 128 rows each: they are not a row's own."""
    x = source.normal(1000, 2048)

    def run(rows):
        q, scale, _, _ = tiercel.fp8_quantize_transpose(x[rows])
        return q.view(torch.uint8), scale

    return Rows(1000, run)
