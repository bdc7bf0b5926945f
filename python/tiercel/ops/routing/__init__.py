# SPDX-License-Identifier: Apache-2.0
"""Routing of a mixture of experts: choosing experts, sorting rows, summing."""
