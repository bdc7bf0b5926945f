# SPDX-License-Identifier: Apache-2.0
"""The names that Bazel's own tools load."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
