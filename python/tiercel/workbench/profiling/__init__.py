# SPDX-License-Identifier: Apache-2.0
"""Nsight Compute, Nsight Systems and compute-sanitizer behind one command, and what they found."""


class ProfileError(Exception):
    """An error that the user can put right; the text says how."""
