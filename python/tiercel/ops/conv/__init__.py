# SPDX-License-Identifier: Apache-2.0
"""Short causal convolutions along sequences."""
