# SPDX-License-Identifier: Apache-2.0
"""``tiercel deploy``: the wheel and your backends on another machine, by its ssh, and back.

One ssh session does it all. At its other end runs `agent`, which is sent over it; the two talk in
messages (`wire`). When the session ends, for whatever reason, the agent stops what it started and
removes what it made.
"""


class DeployError(Exception):
    """An error that the user can put right; the text says how."""
