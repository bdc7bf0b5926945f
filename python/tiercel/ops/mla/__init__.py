# SPDX-License-Identifier: Apache-2.0
"""Latent attention over a paged cache, and writes into it."""
