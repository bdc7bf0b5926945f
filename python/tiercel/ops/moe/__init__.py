# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers: the whole MLP, its halves, grouped products."""
