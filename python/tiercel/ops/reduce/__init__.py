# SPDX-License-Identifier: Apache-2.0
"""Reductions over one dimension."""
