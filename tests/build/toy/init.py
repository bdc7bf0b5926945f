# SPDX-License-Identifier: Apache-2.0
"""A family of one op, for the test that adds one."""
