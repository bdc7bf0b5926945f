# SPDX-License-Identifier: Apache-2.0
"""Names inside a wheel's file name."""

def normalize_distribution(name):
    """The distribution's name as wheel file names spell it."""
    return name.lower().replace("-", "_").replace(".", "_")
