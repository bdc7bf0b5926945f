# SPDX-License-Identifier: Apache-2.0
"""Two processes of torch.distributed."""

import os
import subprocess
import sys

import pytest
import torch

# Marks of a test or of a parameter that needs two GPUs.
ON_TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that this test sees"),
]


def run_two_ranks(program, meeting, *arguments):
    """Runs a program's text as rank 0 and rank 1, with the rank, the file at which they meet, and
    these arguments on its command line; a rank that fails is an error with what it printed."""
    path = os.pathsep.join(p for p in sys.path if p)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, str(rank), str(meeting), *arguments],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
