# SPDX-License-Identifier: Apache-2.0
"""The layer under the ops: declarations, dispatch, choice of backends. Imports nothing above it."""
