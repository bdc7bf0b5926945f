# SPDX-License-Identifier: Apache-2.0
"""Addresses of what is not in the wheel: the documentation of this version."""

from tiercel._version import REPOSITORY, __version__


def docs(page: str) -> str:
    """The address of a page of docs/, as ``plugins.md``; a nightly's is that of today."""
    revision = "main" if ".dev" in __version__ else f"v{__version__}"
    return f"{REPOSITORY}/blob/{revision}/docs/{page}"
