# SPDX-License-Identifier: Apache-2.0
"""The declarations of cross_entropy."""

from __future__ import annotations

from dataclasses import replace

from tiercel.core.spec import FLOATS, INDICES, Call, Float, Int, Spec, Tensor


def _check(call: Call) -> None:
    logits, scale = call.logits, call.scale
    if logits.shape[1] == 0:
        raise ValueError("cross_entropy: `logits` must have at least 1 column, got 0")
    if scale is not None and tuple(scale.shape) not in ((1,), (logits.shape[0],)):
        raise ValueError(
            f"cross_entropy: `scale` must have shape [1] or [T] = [{logits.shape[0]}], "
            f"got {list(scale.shape)}"
        )
    if call.label_smoothing > 1:
        raise ValueError(
            f"cross_entropy: `label_smoothing` must be from 0 to 1, got {call.label_smoothing}"
        )
    if call.softcap is not None and not 0 < call.softcap < float("inf"):
        raise ValueError(
            f"cross_entropy: `softcap` must be a positive number or None, got {call.softcap}"
        )


CROSS_ENTROPY = Spec(
    "cross_entropy",
    Tensor("logits", "T V", FLOATS, strided=True),
    Tensor("target", "T", INDICES, strided=True),
    Tensor("weight", "V", ("float32", "logits"), optional=True),
    Tensor("scale", "*", "float32", strided=True, optional=True),
    Int("ignore_index", -100),
    Float("label_smoothing", 0.0, at_least=0),
    Float("z_loss", 0.0, at_least=0),
    Float("softcap", None, optional=True),
    results=[Tensor("loss", "T", "float32", rtol=1e-5, atol=1e-5)],
    check=_check,
    limits="V up to 442365 (float32) or 884729",
)

# The loss and its gradient in one pass.
WITH_GRADIENT = CROSS_ENTROPY.changed(
    name="cross_entropy_with_gradient",
    results=[*CROSS_ENTROPY.results, Tensor("grad", "T V", "logits")],
    gradient_of="cross_entropy",
)

# Cross-entropy whose gradient overwrites the logits.
IN_PLACE = CROSS_ENTROPY.changed(
    name="cross_entropy_",
    arguments=(replace(CROSS_ENTROPY.tensors[0], written=True), *CROSS_ENTROPY.arguments[1:]),
    gradient_of="cross_entropy",
)

# 1 / (the sum of the weights of the targets that count), which makes a mean of a sum.
# The kernel reads no logits; their shape gives the number of classes.
MEAN = Spec(
    "cross_entropy_mean_scale",
    *CROSS_ENTROPY.tensors[:3],
    Int("ignore_index", -100),
    results=[Tensor("scale", "1", "float32")],
    gradient_of="cross_entropy",
)
