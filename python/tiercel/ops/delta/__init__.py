# SPDX-License-Identifier: Apache-2.0
"""Linear attention by the gated delta rule."""
