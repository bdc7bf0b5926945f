# SPDX-License-Identifier: Apache-2.0
"""Quantisation to FP8 and NVFP4."""
