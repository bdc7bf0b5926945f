# SPDX-License-Identifier: Apache-2.0
"""Kernels of others as backends of our operators.

- ``tiercel.backends.register``, ``load_path``, ``load_folder``, ``load_entry_points``: adding them
- :mod:`tiercel.plugins.contracts`: what an operator asks of every backend, as data
- :mod:`tiercel.plugins.types`: the same as type aliases for annotations
- ``tiercel smoke``, ``tiercel new-kernel``: checking and beginning one

See https://github.com/tiercel/tiercel/blob/main/docs/plugins.md.
"""
