# SPDX-License-Identifier: Apache-2.0
"""tiercel._C on its own: exceptions that are pending, threads and interpreters beside it."""

import importlib.util
import sys
from pathlib import Path

import pytest
from support import fake_driver
from support.dlpack_tensor import ExchangeTensor as T

from tiercel import _C

TESTS = Path(__file__).parents[1]


class Broken:
    """A number that cannot be read."""

    def __index__(self):
        raise ZeroDivisionError("of the number")

    __float__ = __index__


def packed_fp8(number, starts):
    tensors = [T(9, 4, 64, dtype="float8_e4m3fn") for _ in "qkv"] + [T(9, 4, 64, dtype="bfloat16")]
    options = [-1, -1, 0.1, 0.0]
    options[number] = Broken()
    return _C.attention_varlen_fp8_plan(*tensors, *[None] * 5, *options, starts, starts, 9, 9)


def backward(number, _):
    shape = (2, 30, 8, 64)
    tensors = [T(*shape, dtype="bfloat16") for _ in range(5)] + [T(2, 8, 30), None]
    tensors += [T(*shape, dtype="bfloat16") for _ in range(3)]
    options = [-1, -1, 0.1, 0.0]
    options[number] = Broken()
    return _C.attention_backward_plan(*tensors, None, *options, NoTruth())


class NoTruth:
    def __bool__(self):
        raise LookupError("read after an exception")


@pytest.mark.parametrize("call", [packed_fp8, backward])
@pytest.mark.parametrize("number", range(4))
def test_an_exception_ends_the_reading_of_arguments(call, number):
    """Else the next argument's own error would take its place."""
    with pytest.raises(ZeroDivisionError, match="of the number"):
        call(number, "no tensor")


OUT_OF_MEMORY = """
from support.dlpack_tensor import ExchangeTensor as T
from tiercel import _C

def empty(sizes, dtype, device):
    if dtype == "float32":
        raise MemoryError("no room for lse")
    return T(*sizes, dtype="bfloat16")

_C.set_allocation_hooks(empty, None, None, "float32")
q, cache = T(2, 1, 8, 64, dtype="bfloat16"), T(9, 16, 8, 64, dtype="bfloat16")
q.dtype, q.device = "bfloat16", "cuda"
inputs = q, cache, cache, T(2, 4, dtype="int32"), T(2, dtype="int32")
try:
    _C.decode_attention_new_lse(*inputs, None, None, None, True, None, None, None, None)
except BaseException as error:
    print(type(error).__name__, error)
"""


def test_no_memory_for_the_second_output_is_said_as_such(run_python):
    out = run_python(OUT_OF_MEMORY, path=[TESTS]).stdout
    assert out.strip() == "MemoryError no room for lse"


# cuInit takes a second; meanwhile another thread has to run more than once.
THREADS = """
import threading, time
from tiercel import _C
ticks, done = 0, threading.Event()
def tick():
    global ticks
    while not done.is_set():
        ticks += 1
        time.sleep(0.01)
thread = threading.Thread(target=tick)
thread.start()
while ticks == 0:
    time.sleep(0.001)
before = ticks
{call}
during = ticks - before
done.set()
thread.join()
print(during)
"""


@pytest.mark.parametrize("call", ["_C.driver_info()", "_C.device_capability(0)"])
def test_other_threads_run_while_the_driver_starts(run_python, tmp_path, call):
    library = fake_driver.build(tmp_path, init_seconds=1)
    out = run_python(THREADS.replace("{call}", call), TIERCEL_LIBCUDA=library).stdout
    assert int(out) >= 5


INTERPRETERS = next(
    name
    for name in ("_interpreters", "_xxsubinterpreters")
    if name in sys.builtin_module_names or importlib.util.find_spec(name)
)
SUBINTERPRETER = """
import os, sys
import {interpreters} as interpreters
if {first}:
    from tiercel import _C
reader, writer = os.pipe()
code = '''
import os, sys
sys.path[:] = %r
try:
    from tiercel import _C
    said = "imported"
except ImportError as error:
    said = str(error)
os.write(%d, said.encode())
''' % (sys.path, writer)
interpreters.run_string(interpreters.create({kind}), code)
print(os.read(reader, 1000).decode(), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", ["", "legacy"])
def test_a_subinterpreter_gets_an_import_error(run_python, first, kind):
    if kind and INTERPRETERS == "_xxsubinterpreters":
        kind = "isolated=False"
    code = SUBINTERPRETER.format(
        interpreters=INTERPRETERS, first=first, kind=repr(kind) if kind == "legacy" else kind
    )
    out = run_python(code).stdout
    assert out.strip().endswith("does not support loading in subinterpreters")
