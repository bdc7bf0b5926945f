# SPDX-License-Identifier: Apache-2.0
"""Attention: forward, backward, packed sequences, paged caches, merging."""
