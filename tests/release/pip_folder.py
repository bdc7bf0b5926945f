# SPDX-License-Identifier: Apache-2.0
"""pip, unpacked. From the wheel itself Python keeps no bytecode: each start takes two seconds."""

import functools
import os
import pathlib
import tempfile
import zipfile

_scratch = tempfile.TemporaryDirectory(prefix="tiercel-pip-")


@functools.cache
def pip_folder() -> pathlib.Path:
    """A folder for PYTHONPATH, with the wheel's name."""
    wheel = next(path for path in os.environ["TEST_WHEELS"].split() if "/pip-" in path)
    folder = pathlib.Path(_scratch.name, pathlib.Path(wheel).name)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
