# SPDX-License-Identifier: Apache-2.0
"""Attention: forward, backward, packed sequences, decoding from a cache, merging."""
