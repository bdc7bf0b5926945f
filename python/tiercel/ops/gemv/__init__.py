# SPDX-License-Identifier: Apache-2.0
"""Products of NVFP4 matrices with vectors and with few rows."""
