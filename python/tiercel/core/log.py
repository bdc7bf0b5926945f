# SPDX-License-Identifier: Apache-2.0
"""The logger ``tiercel``; TIERCEL_LOG=debug|info|warning sends it to stderr."""

import logging
import os

logger = logging.getLogger("tiercel")
logger.addHandler(logging.NullHandler())


def _from_environment() -> None:
    name = os.environ.get("TIERCEL_LOG", "").strip().upper()
    if not name:
        return
    level = logging.getLevelName(name)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s tiercel %(levelname)s %(message)s"))
    logger.addHandler(handler)
    if isinstance(level, int):
        logger.setLevel(level)
    else:
        logger.warning("TIERCEL_LOG=%s is no logging level", name)


_from_environment()
