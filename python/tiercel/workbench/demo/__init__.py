# SPDX-License-Identifier: Apache-2.0
"""A minute's tour of what Tiercel does on this machine."""
