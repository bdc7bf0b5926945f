# SPDX-License-Identifier: Apache-2.0
"""The tools beside the library that a model imports: ``tiercel bench``, ``tune``, ``smoke``, ...

``tiercel.cli`` has their commands. No operator imports them.
"""
