# SPDX-License-Identifier: Apache-2.0
"""``import tiercel``: fast, without PyTorch, and clear about what is missing."""

import sys

import pytest

# A finder that hides an installed PyTorch.
NO_TORCH = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""
FIRST_USES = [
    "import tiercel; tiercel.topk_softmax",
    "from tiercel import topk_softmax",
    "import tiercel.ops",
    "import tiercel.ref",
    "import tiercel.nn",
    "import tiercel.ops.norm",
    "import tiercel.ops.norm.contract; tiercel.ops.rms_norm",
    "import tiercel; tiercel.explain('topk_softmax')",
    "import tiercel; tiercel.set_backend('topk_softmax', 'ref')",
]


def test_import_takes_less_than_30_ms(run_python):
    code = """
import time
start = time.perf_counter()
import tiercel
elapsed = time.perf_counter() - start
import sys
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert "tiercel._C" not in sys.modules
print(elapsed)
"""
    times = [float(run_python(code).stdout) for _ in range(7)]
    assert min(times) < 0.030, times


def test_version(run_python):
    from importlib.metadata import version

    out = run_python(NO_TORCH + "import tiercel; print(tiercel.__version__)").stdout
    assert out.strip() == version("tiercel")


def test_everything_public_is_listed_without_torch(run_python):
    code = "import tiercel; print(set(tiercel.__all__) - set(dir(tiercel)), tiercel.backends)"
    assert run_python(NO_TORCH + code).stdout.startswith("set()")


def test_an_unknown_name_is_an_attribute_error():
    import tiercel

    with pytest.raises(AttributeError, match="module 'tiercel' has no attribute 'no_such_op'"):
        tiercel.no_such_op  # noqa: B018


@pytest.mark.parametrize("code", FIRST_USES)
def test_without_torch_the_first_use_says_so(run_python, code):
    result = run_python(NO_TORCH + code, check=False)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ImportError: tiercel needs PyTorch 2.9 or newer, and none is installed: "
        "pip install 'tiercel[torch]'"
    )


@pytest.mark.parametrize("code", FIRST_USES)
@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cu128", "1.13.1"])
def test_an_old_torch_is_named(run_python, tmp_path, code, version):
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    result = run_python(code, path=[tmp_path / "stub"], check=False)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        f"ImportError: tiercel needs PyTorch 2.9 or newer, found {version}: "
        "pip install --upgrade torch"
    )


def test_importing_after_an_old_torch_still_works(run_python, tmp_path):
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text("__version__ = '2.8.0'\n")
    run_python("import torch, tiercel; print(tiercel.__version__)", path=[tmp_path / "stub"])


def test_a_broken_torch_keeps_its_own_message(run_python, tmp_path):
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text("import no_such_library\n")
    result = run_python(
        "import tiercel; tiercel.topk_softmax", path=[tmp_path / "stub"], check=False
    )
    assert "No module named 'no_such_library'" in result.stderr


@pytest.mark.parametrize("kind", ["cases", "contract", "peers", "tune"])
def test_the_data_of_families_imports_without_torch(run_python, kind):
    code = f"""
from tiercel import _families
names = _families.files({kind!r})
for name in names:
    __import__(name)
assert names and "torch" not in sys.modules
"""
    run_python(NO_TORCH + code)


@pytest.mark.parametrize("name", ["kernels", "liger", "torch", "transformers"])
def test_integrations_without_torch_say_so(run_python, name):
    result = run_python(f"{NO_TORCH}import tiercel.integrations.{name}", check=False)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ImportError: tiercel needs PyTorch 2.9 or newer, and none is installed: "
        "pip install 'tiercel[torch]'"
    )


def test_bench_model_without_torch_says_so(run_python):
    code = "from tiercel.cli import main; sys.exit(main(['bench', 'model']))"
    result = run_python(NO_TORCH + code, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("tiercel bench: tiercel needs PyTorch 2.9 or newer, and none")


def test_the_compiled_module_imports_without_torch(run_python):
    run_python(NO_TORCH + "from tiercel import _C; _C.driver_info()")


def test_module_command(run_command):
    out = run_command([sys.executable, "-m", "tiercel", "--version"]).stdout
    assert out.startswith("tiercel ")
