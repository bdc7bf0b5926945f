# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.tiercel.*`` is there whichever of the two is imported first."""

import pytest

pytestmark = pytest.mark.torch

CALL = "print(torch.ops.tiercel.topk_softmax(torch.zeros(2, 4), 1)[1].tolist())"


@pytest.mark.parametrize(
    "code",
    [
        "import torch; import tiercel; " + CALL,
        "import tiercel; import torch; import tiercel.ops; " + CALL,
        "import tiercel; tiercel.topk_softmax; import torch; " + CALL,
        "import tiercel; import torch; tiercel.topk_softmax(torch.zeros(2, 4), 1); " + CALL,
        "from tiercel import topk_softmax; import torch; " + CALL,
        "import tiercel.nn; import torch; " + CALL,
        "import tiercel; dir(tiercel); import torch; import tiercel.ops; " + CALL,
        "import tiercel.ref; import torch; import tiercel.ops; " + CALL,
        "import tiercel.ops.norm.contract; import torch; tiercel.ops.rms_norm; " + CALL,
    ],
)
def test_registered(run_python, code):
    assert run_python(code).stdout.strip() == "[[0], [0]]"


def test_threads_import_at_once(run_python):
    code = """
import threading, torch, warnings
warnings.simplefilter("ignore")
barrier, failures = threading.Barrier(8), []
def work():
    barrier.wait()
    try:
        import tiercel
        assert tiercel.topk_softmax(torch.zeros(2, 4), 1)[1].tolist() == [[0], [0]]
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failures, failures
"""
    run_python(code)
