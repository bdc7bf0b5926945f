# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL: declarations of kernels, their compilation, what a cubin says."""
