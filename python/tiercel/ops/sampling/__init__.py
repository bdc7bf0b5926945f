# SPDX-License-Identifier: Apache-2.0
"""Tokens from the logits of a language model."""
