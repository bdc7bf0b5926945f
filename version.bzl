# SPDX-License-Identifier: Apache-2.0
"""The version, in its one place. Python sees it as tiercel.__version__."""

VERSION = "0.1.0"
