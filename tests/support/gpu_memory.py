# SPDX-License-Identifier: Apache-2.0
"""Tests that need gigabytes of a GPU which other processes may use too."""

import pytest
import torch


def skip_without(gibibytes):
    """Skips the test unless this much memory of the GPU is free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gibibytes:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory, got {free:.1f}")
