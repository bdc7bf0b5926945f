# SPDX-License-Identifier: Apache-2.0
"""What ``tiercel new-kernel`` writes: ``<op>_<language>.py``, with ``new_kernel`` for its name.

They are ordinary Python files, checked and tested as such; nothing imports them from here.
"""
