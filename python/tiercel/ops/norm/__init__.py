# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and LayerNorm."""
