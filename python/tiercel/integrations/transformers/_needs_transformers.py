# SPDX-License-Identifier: Apache-2.0
"""Says in one sentence when transformers is missing or too old; imported before the others."""

_NEED = "tiercel.integrations.transformers needs transformers 5 or newer"

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise  # transformers is there but broken: its own message says more
    problem = f"{_NEED}, and none is installed: pip install 'transformers>=5'"
    raise ModuleNotFoundError(problem, name="transformers") from None

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(
        f"{_NEED}, found {transformers.__version__}: pip install --upgrade transformers"
    )
