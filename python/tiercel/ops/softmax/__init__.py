# SPDX-License-Identifier: Apache-2.0
"""Softmax with a scale and a mask, and its logarithm."""
