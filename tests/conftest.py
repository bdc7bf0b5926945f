# SPDX-License-Identifier: Apache-2.0
"""What all tests of the installed wheel share. Run them as ``pytest tests/routing``, with
``-m gpu`` on a machine with an H100 or H200. What only Bazel can run is skipped elsewhere."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for `support`

# Tests of what their Bazel targets bring: a variable that is set there, a package, or a file of the
# checkout, and the targets. Without it they are skipped; under Bazel (TEST_SRCDIR) never.
NEEDS = {
    "build": ("$TEST_SRCDIR", "//tests/build/..."),
    "ci/test_gpu_script.py": ("$WHEEL", "//tests/ci:gpu_script_test"),
    "cute": ("$CUTE_SITE", "//tests/cute/..."),
    "deploy/test_deploy.py": ("$WHEEL", "//tests/deploy:deploy_test"),
    "emulator": ("$TIERCEL_LIBCUDA", "//tests/emulator/..."),
    "emulator/tensor": ("$EMULATOR_PROBE", "//tests/emulator/tensor/..."),
    "examples": ("import transformers", "//tests/examples/..."),
    "integrations": ("import transformers", "//tests/integrations/..."),
    "packaging": ("$TEST_SRCDIR", "//tests/packaging/..."),
    "release": ("$TEST_SRCDIR", "//tests/release/..."),
    "routing/test_sorting_networks.py": (
        "kernels/routing/sorting.cuh",
        "//tests/routing:test_sorting_networks",
    ),
}


def _is_there(thing):
    if thing[0] == "$":
        return thing[1:] in os.environ
    package = thing.removeprefix("import ")
    return bool(find_spec(package)) if package != thing else (ROOT / thing).exists()


def _lacks(path):
    """Why a test file cannot run here, or None."""
    if "TEST_SRCDIR" in os.environ or not path.is_relative_to(ROOT / "tests"):
        return None
    inside = path.relative_to(ROOT / "tests")
    for place in (inside, *inside.parents):
        if entry := NEEDS.get(place.as_posix()):
            thing, targets = entry
            return (
                None
                if _is_there(thing)
                else f"needs {thing} of its Bazel target: ./bazelw test {targets}"
            )
    return None


class _Skipped(pytest.Module):
    """A test file that is not even imported."""

    def collect(self):
        pytest.skip(_lacks(self.path), allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if _lacks(module_path):
        return _Skipped.from_parent(parent, path=module_path)
    return None


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
def _filled(request):
    """Fills new tensors with NaN where tools/sanitizer/run.py asks for that."""
    if not os.environ.get("TIERCEL_TEST_FILL") or not request.node.get_closest_marker("gpu"):
        yield
        return
    import torch

    import tiercel.ops  # noqa: F401  (sets the hooks, which the next line changes)
    from tiercel import _C

    _C.set_allocation_hooks(torch.empty, None, None, torch.float32)  # Inductor's does not fill
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which is what fills them
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _from_the_start():
    """Backends and warnings as in a new process."""
    yield
    selection = sys.modules.get("tiercel.core.selection")
    if selection is not None:
        selection._warned.clear()
        selection._process.clear()
        selection._update(0)


@pytest.fixture
def on_ref():
    """Runs ops by their references; without a GPU the default does that too, with a warning."""
    import tiercel

    with tiercel.use_backend("ref"):
        yield


@pytest.fixture(params=["ExchangeTensor", "AttributeTensor"])
def make(request):
    """Makes tensors without PyTorch, for each of the two ways in which `_C` reads them."""
    import support.dlpack_tensor

    return getattr(support.dlpack_tensor, request.param)


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
