# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings, and writing to a key-value cache."""
