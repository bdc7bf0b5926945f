# SPDX-License-Identifier: Apache-2.0
"""Copies with the last two dimensions exchanged."""
