# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention_varlen."""

from __future__ import annotations

from tiercel import _C
from tiercel.core.op import Native, Op
from tiercel.ops.attention import reference as ref
from tiercel.ops.attention import spec
from tiercel.ops.attention.backward import Launch, by_reference
from tiercel.ops.attention.indices import packed_indices

_LAUNCH = Launch(_C.attention_varlen_backward, _C.attention_varlen_backward_plan, starts=2)

BACKWARD = Op(
    spec.ATTENTION_VARLEN_BACKWARD,
    sm90=Native(
        _LAUNCH,
        _LAUNCH.plan,
        (*spec.ATTENTION_VARLEN_BACKWARD.names, *spec.ATTENTION_VARLEN_BACKWARD.result_names),
        "as attention_backward's, for all sequences at once; the GPU lists their tiles",
        language="cute",
        load=_C.attention_backward_load,
    ),
    reference=by_reference(spec.ATTENTION_VARLEN_BACKWARD, ref.attention_varlen_backward),
    method="all scores in memory, float32",
    indices=packed_indices,
    out=False,
)
