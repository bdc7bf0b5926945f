# SPDX-License-Identifier: Apache-2.0
"""``tiercel smoke``: is each backend right, and how fast is it?

Every backend runs in a process of its own (:mod:`worker`), which writes what it finds to a file
line by line; so one that hangs or crashes loses nothing but its own rest (:mod:`run`).
"""
