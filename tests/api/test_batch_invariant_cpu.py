# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode where sm90 does not run, and under torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tiercel

pytestmark = pytest.mark.torch


def test_ref_does_not_stand_in():
    x = torch.randn(4, 64)
    text = r"^rms_norm: .* \(in the batch-invariant mode ref does not stand in"
    with tiercel.batch_invariant():
        with pytest.raises(RuntimeError, match=text):
            tiercel.rms_norm(x)
        assert tiercel.rms_norm(x, backend="ref").shape == x.shape


@pytest.mark.filterwarnings("ignore::tiercel.backends.FallbackWarning")
def test_torch_compile_guards_on_the_mode():
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tiercel.rms_norm(x, backend="ref") + 1, backend=counter)
    x = torch.randn(4, 64)
    compiled(x)
    compiled(x)
    assert counter.frame_count == 1
    with tiercel.batch_invariant():
        compiled(x)
        compiled(x)
    assert counter.frame_count == 2
    compiled(x)
    assert counter.frame_count == 2
