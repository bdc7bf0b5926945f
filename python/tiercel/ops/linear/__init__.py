# SPDX-License-Identifier: Apache-2.0
"""Linear layers with an activation, gated ones, MLPs and FP8."""
