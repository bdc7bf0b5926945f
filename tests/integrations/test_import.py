# SPDX-License-Identifier: Apache-2.0
"""``import tiercel.integrations.transformers`` says which transformers it needs."""

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("version", "error", "found"),
    [
        (None, "ModuleNotFoundError", "and none is installed: pip install 'transformers>=5'"),
        ("4.57.1", "ImportError", "found 4.57.1: pip install --upgrade transformers"),
    ],
)
def test_transformers_missing_or_old_is_named(run_python, tmp_path, version, error, found):
    code, path = "import sys; ", []
    if version is None:
        code += "sys.modules['transformers'] = None; "
    else:
        (tmp_path / "stub" / "transformers").mkdir(parents=True)
        text = f"__version__ = {version!r}\n"
        (tmp_path / "stub" / "transformers" / "__init__.py").write_text(text)
        path = [tmp_path / "stub"]
    code += "import tiercel.integrations.transformers"
    result = run_python(code, path=path, check=False)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        f"{error}: tiercel.integrations.transformers needs transformers 5 or newer, {found}"
    )
