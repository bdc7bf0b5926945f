# SPDX-License-Identifier: Apache-2.0
"""The version, in its one place, which Python sees as tiercel.__version__; and the repository's."""

VERSION = "0.1.0"

# Links of the package's page on an index and of error texts begin so.
REPOSITORY = "https://github.com/tiercel/tiercel"
