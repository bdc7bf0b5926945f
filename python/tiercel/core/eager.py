# SPDX-License-Identifier: Apache-2.0
"""Decides if a call may skip torch's dispatcher."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from tiercel import _C

# The answers of `route`.
DISPATCH = 0  # a mode, a tracer or a tensor subclass wants to see the call
DIRECT = 1  # plain tensors, nothing watching, no gradient wanted
GRAD = 2  # the same, but a gradient is wanted
TRANSFORMED = 3  # inside a functorch transform (vmap, grad, jvp) or forward-mode AD

_C.set_route_hooks(
    torch.Tensor,
    torch.nn.Parameter,
    torch._C._are_functorch_transforms_active,
    forward_ad,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._is_tracing,
    torch.is_grad_enabled,
    torch._C._autograd._profiler_enabled,
)
route = _C.route

# Inductor's own allocation on the current GPU saves a microsecond a tensor; elsewhere and where a
# torch lacks it, torch.empty.
_C.set_allocation_hooks(
    torch.empty,
    getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None),
    getattr(torch._C, "_cuda_getDevice", None),
    torch.float32,
)
empty = _C.empty

# Dynamo takes this for a constant, so it never gets to `route`.
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
