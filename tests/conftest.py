# SPDX-License-Identifier: Apache-2.0
"""What all tests of the installed wheel share. Run them as ``pytest tests/routing``, with
``-m gpu`` on a machine with an H100 or H200."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `support`


def pytest_collection_modifyitems(config, items):
    """Leaves GPU tests out unless -m speaks of them; a selected one fails without a GPU."""
    if "gpu" in config.getoption("markexpr", ""):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _needs_gpu(request):
    if not request.node.get_closest_marker("gpu"):
        return
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.fail("this test needs an H100 or H200 and a CUDA build of PyTorch", pytrace=False)


@pytest.fixture(autouse=True)
def _from_the_start():
    """Backends and warnings as in a new process."""
    yield
    backends = sys.modules.get("tiercel.backends")
    if backends is not None:
        backends._warned.clear()
        backends._process.clear()
        backends._update(0)


@pytest.fixture
def no_fallback():
    """A test that silently ran on ref would prove nothing."""
    import tiercel

    with warnings.catch_warnings():
        warnings.simplefilter("error", tiercel.FallbackWarning)
        yield


@pytest.fixture
def run_command(tmp_path):
    """Runs a program: (arguments, environment) -> completed process."""

    def run(arguments, *, path=(), check=True, **environment):
        env = {k: v for k, v in os.environ.items() if not k.startswith("TIERCEL_")}
        env.update({k: str(v) for k, v in environment.items()})
        if path:
            paths = [*map(str, path), *filter(None, [env.get("PYTHONPATH")])]
            env["PYTHONPATH"] = os.pathsep.join(paths)
        result = subprocess.run(
            arguments, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def run_python(run_command):
    """Runs code in a new interpreter: (code, environment) -> completed process."""
    return lambda code, **kwargs: run_command([sys.executable, "-c", code], **kwargs)
