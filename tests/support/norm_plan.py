# SPDX-License-Identifier: Apache-2.0
"""Plans of the norms' gradients, of a named device: a machine's own GPU decides nothing."""

from support.dlpack_tensor import ADDRESS, ExchangeTensor

from tiercel import _C

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
OPS = ["rms_norm", "layer_norm"]
H100, H200 = (132, 3352), (132, 4916)  # multiprocessors, gigabytes a second


def backward(
    rows,
    columns,
    dtype="bfloat16",
    *,
    op="rms_norm",
    residual=False,
    device=H200,
    weight_address=ADDRESS,
    config=None,
    **of_x,
):
    def tensor(**more):
        return ExchangeTensor(rows, columns, dtype=dtype, **more)

    return getattr(_C, f"{op}_backward_plan")(
        tensor(**of_x),
        ExchangeTensor(columns, dtype=dtype, address=weight_address),
        tensor(),
        tensor() if residual else None,
        tensor(),
        *(None, None, None, 1e-5),
        *device,
        *([] if config is None else [config]),
    )
