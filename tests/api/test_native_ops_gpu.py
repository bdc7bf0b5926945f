# SPDX-License-Identifier: Apache-2.0
"""The ops as native functions of torch's dispatcher on a GPU, in processes without tiercel."""

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu]

_PROLOGUE = """
import ctypes, importlib.util, pathlib, sys, time
import torch
import torch.nn.functional as F
folder = pathlib.Path(importlib.util.find_spec("tiercel").origin).parent
library = ctypes.CDLL(str(next(folder.glob("_C.*.so"))))
library.tiercel_register_torch_ops.restype = ctypes.c_char_p
error = library.tiercel_register_torch_ops()
assert error is None, error
ops = torch.ops.tiercel
close = torch.testing.assert_close
torch.manual_seed(0)
torch.set_grad_enabled(False)
x = torch.randn(37, 4096, device="cuda", dtype=torch.bfloat16)
residual, weight = torch.randn_like(x), torch.randn(4096, device="cuda", dtype=torch.bfloat16)
"""

_CASES = {
    "results": """
out, total = ops.add_rms_norm(x, residual, weight)
assert torch.equal(total, x + residual)
expected = F.rms_norm((x.float() + residual.float()), (4096,), weight.float(), 1e-6)
close(out.float(), expected, rtol=1.6e-2, atol=2e-2)
gate, up = x.float().chunk(2, -1)
close(ops.silu_and_mul(x).float(), F.silu(gate) * up, rtol=1.6e-2, atol=2e-2)
w = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16) / 64
close(ops.linear_act(x, w, None, "none").float(), x.float() @ w.float().T, rtol=2e-2, atol=2e-2)
""",
    "the current stream": """
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.cuda._sleep(200_000_000)
    late = residual + 1
    out = ops.rms_norm(late, weight)
close(out.float().cpu(), F.rms_norm(late.float(), (4096,), weight.float(), 1e-6).cpu(),
      rtol=1.6e-2, atol=2e-2)
""",
    "a CUDA graph": """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):  # the first call of all
    out = ops.rms_norm(x, weight)
x.copy_(residual)
graph.replay()
close(out, ops.rms_norm(residual, weight), rtol=0, atol=0)
""",
    "a tensor on the CPU": """
try:
    ops.rms_norm(x, weight.cpu())
except RuntimeError as error:
    assert "weight" in str(error)
else:
    raise AssertionError
""",
    "host time": """
def microseconds(call):
    for _ in range(1000):
        call()
    best = 1e9
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        best = min(best, (time.perf_counter() - start) / 500)
    torch.cuda.synchronize()
    return best * 1e6

small, more = x[:1].contiguous(), residual[:1].contiguous()
ours = microseconds(lambda: ops.add_rms_norm.default(small, more, weight))
torchs = microseconds(lambda: torch.add(small, more))
print(f"host time from Python through the dispatcher: {ours:.2f} us; torch.add: {torchs:.2f} us")
assert ours < torchs + 12
""",
}


@pytest.mark.parametrize("case", _CASES)
def test_without_tiercels_python(run_python, case):
    print(run_python(_PROLOGUE + _CASES[case] + "\nassert 'tiercel' not in sys.modules\n").stdout)
