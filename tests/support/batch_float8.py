# SPDX-License-Identifier: Apache-2.0
"""The cases of batch_rows.py for what trains with float8, and for layers that take it as well."""

import torch
from support.batch_rows import Rows, case, routed

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


@case("gated_linear", "blocks", n=1408, k=4096)
@case("gated_linear", "blocks-long", n=512, k=7168)
def gated_linear(source, n, k):
    x, weight = source.normal(2500, k), source.normal(2 * n, k, factor=0.02)
    quantized, scale = tiercel.fp8_quantize(weight, "128x128")
    return Rows(2500, lambda rows: (tiercel.gated_linear(x[rows], quantized, weight_scale=scale),))


@case("w4_moe", "float8")
def w4_moe(source):
    x, weights, ids, up, down = routed(source)
    x, x_scale = tiercel.fp8_quantize(x)
    halves = []
    for experts, rows, columns in (up.shape, down.shape):
        codes = source.whole(256, experts, rows, columns // 2, dtype=torch.uint8)
        halves += [codes, source.whole(4, experts, rows, columns // 32, dtype=torch.uint8) + 121]

    def run(rows):
        given = (x[rows], *halves, weights[rows], ids[rows])
        return (tiercel.w4_moe(*given, x_scale=x_scale[rows]),)

    return Rows(len(x), run)
