# SPDX-License-Identifier: Apache-2.0
"""tiercel._C.EagerCall: outputs and launch without Python, and the calls it leaves to Python."""

import gc
import weakref

import pytest
import torch

from tiercel import _C
from tiercel.core import eager  # noqa: F401  (hands torch to _C)

pytestmark = pytest.mark.torch
X, LIKE_X = ("argument", 0), (0, 0, 1, ((0, -1, 1, -1),), None)


class Launch:
    """Keeps what it was called with."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, *args):
        self.calls.append(args)
        if self.error is not None:
            raise self.error


def run_in_python(*args):
    return ("run", *args)


def fallback(*args):
    return ("fallback", *args)


def recover(error, backend, args):
    raise error


def made(native, slots, *, count, tensors=(0,), ready=(-1,), mutated=(), **options):
    """An eager call for the CPU, whose index is -1."""
    return _C.EagerCall(
        count=count,
        tensors=tensors,
        mutated=mutated,
        ready=set(ready),
        run=run_in_python,
        recover=recover,
        fallback=fallback,
        increment_version=torch._C._increment_version,
        native=native,
        slots=slots,
        outputs=options.get("outputs", ()),
        contiguous=options.get("contiguous", ()),
        ranks=options.get("ranks", ()),
        equals=options.get("equals", ()),
        returns=options.get("returns", False),
        absent=options.get("absent", ()),
    )


@pytest.mark.parametrize("shape", [(3, 8), (1,), (0, 4), (2, 3, 4), (1,) * 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_an_output_like_an_argument(shape, dtype):
    launch, x = Launch(), torch.zeros(shape, dtype=dtype)
    slots = (X, ("constant", None), ("output", 0), ("constant", 7), ("argument", 1))
    call = made(launch, slots, count=3, contiguous=(0,), outputs=(LIKE_X,))
    out = call(x, 1.5, None)
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)
    assert launch.calls == [(x, None, out, 7, 1.5)] and launch.calls[0][2] is out


def test_a_divided_size_another_dtype_and_two_outputs():
    launch, x = Launch(), torch.zeros(3, 8)
    half = (0, torch.float16, 1, ((0, -1, 2, -1),), None)
    slots = (("output", 1), ("output", 0))
    pair = made(launch, slots, count=2, outputs=(half, LIKE_X))(x, None)
    assert isinstance(pair, tuple) and [t.shape for t in pair] == [(3, 4), (3, 8)]
    assert [t.dtype for t in pair] == [torch.float16, torch.float32]
    assert launch.calls[0][0] is pair[1] and launch.calls[0][1] is pair[0]


def test_sizes_of_several_arguments_and_an_int():
    launch, x, weight = Launch(), torch.zeros(3, 8).t(), torch.zeros(5, 8)
    output = (0, 3, None, ((0, 0, 1, -1), (1, 0, 1, -1), (2, 0, 1, -1)), None)
    call = made(
        launch, (X, ("output", 0)), count=5, tensors=(0, 1), outputs=(output,), ranks=((0, 2),)
    )
    out = call(x, weight, 4, torch.int64, None)
    assert out.shape == (8, 5, 4) and out.dtype == torch.int64
    for other in (x[None], torch.tensor(1)):
        assert call(other, weight, 4, torch.int64, None)[0] == "run"
    for size in (-1, 2.0, None, 1 << 80):
        assert call(x, weight, size, torch.int64, None)[0] == "run"
    assert len(launch.calls) == 1


def test_a_size_and_a_dtype_that_depend_on_a_given_argument():
    output = (0, 0, 1, ((0, -1, 2, 1),), (2, torch.float16))
    call = made(Launch(), (X,), count=4, tensors=(0, 1, 2), outputs=(output,))
    x = torch.zeros(2, 6)
    assert call(x, None, None, None).shape == (2, 3)
    assert call(x, x, None, None).shape == (2, 6)
    assert call(x, None, x, None).dtype == torch.float16


def test_a_dtype_that_another_takes_the_place_of():
    output = (0, 0, 1, ((0, -1, 1, -1),), None, (torch.float8_e4m3fn, torch.bfloat16))
    call = made(Launch(), (X, ("output", 0)), count=2, outputs=(output,))
    x = torch.zeros(2, 6)
    assert call(x, None).dtype == torch.float32
    assert call(x.to(torch.float8_e4m3fn), None).dtype == torch.bfloat16


def test_as_many_tensors_as_a_call_may_have():
    launch, tensors = Launch(), [torch.zeros(2) for _ in range(16)]
    slots = tuple(("argument", place) for place in range(16))
    call = made(launch, slots, count=17, tensors=tuple(range(16)), contiguous=tuple(range(16)))
    assert call(*tensors, None) is None
    assert all(got is due for got, due in zip(launch.calls[0], tensors, strict=True))


def test_a_size_that_an_int_states():
    launch, x, out = Launch(), torch.zeros(3, 8), torch.zeros(3, 2)
    call = made(launch, (X,), count=4, tensors=(0, 2), mutated=(2,), equals=((2, 1, 1),))
    assert call(x, 2, out, None) is None and len(launch.calls) == 1
    assert call(x, 3, out, None)[0] == "run" and len(launch.calls) == 1


def test_an_optional_tensor_that_python_rearranges():
    launch, x = Launch(), torch.zeros(2)
    call = made(launch, (X, ("argument", 1)), count=3, tensors=(0, 1), absent=(1,))
    assert call(x, None, None) is None and launch.calls == [(x, None)]
    assert call(x, x, None)[0] == "run" and len(launch.calls) == 1


def test_written_arguments_get_a_new_version():
    x = torch.zeros(3)
    made(Launch(), (X,), count=2, mutated=(0,))(x, None)
    assert x._version == 1


def test_results_of_the_native_function():
    call = made(lambda x: x + 1, (X,), count=2, returns=True)
    assert call(torch.zeros(2), None).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("key", "index"),
    [("a", 1), ("b", 2), ("c", None), (1, 3), (True, None), ([], None), (None, 4)],
)
def test_lookups(key, index):
    launch, table = Launch(), {"a": 1, "b": 2, 1: 3, None: 4}
    call = made(launch, (("lookup", (1, table)),), count=3)
    result = call(torch.zeros(1), key, None)
    assert launch.calls == ([] if index is None else [(index,)])
    assert (result is None) == (index is not None)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("x", "reached"),
    [
        (torch.zeros(4, 8).t(), "run"),
        (torch.zeros(4, 8)[:, ::2], "run"),
        (torch.zeros(4, 8)[:, :7], "run"),
        (torch.zeros(4, 7), "run"),  # cannot be halved
        (torch.tensor(1.0), "run"),
        (torch.zeros(4, 8).as_subclass(Subclass), "fallback"),
        (torch.zeros(4, 8, requires_grad=True), "fallback"),
        ("no tensor", "fallback"),
        (None, "fallback"),
    ],
    ids=str,
)
def test_other_calls_are_left_to_python(x, reached):
    launch = Launch()
    half = (0, 0, 1, ((0, -1, 2, -1),), None)
    call = made(launch, (X, ("output", 0)), count=2, contiguous=(0,), outputs=(half,))
    result = call(x, None)
    assert result[0] == reached and result[1] is x and not launch.calls
    assert call(x, None, 3) == ("fallback", x, None, 3)


def test_the_choice_of_a_backend():
    launch, x = Launch(), torch.zeros(2)
    call = made(launch, (X,), count=2)
    assert call(x, "sm90") is None and call(x, "".join(["sm", "90"])) is None
    assert call(x, "ref")[0] == "fallback" and call(x, 1)[0] == "fallback"
    assert made(launch, (X,), count=2, ready=())(x, None)[0] == "fallback"
    _C.set_overriding(True)
    try:
        assert call(x, None)[0] == "fallback" and call(x, "sm90") is None
    finally:
        _C.set_overriding(False)


def test_an_error_of_the_launch_drops_the_outputs():
    launch = Launch(ValueError("no"))
    call = made(launch, (X, ("output", 0)), count=2, outputs=(LIKE_X,))
    with pytest.raises(ValueError, match="no"):
        call(torch.zeros(3), None)
    out = weakref.ref(launch.calls.pop()[1])
    launch.error.__traceback__ = None  # its frames hold what was passed
    gc.collect()
    assert out() is None


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        ((("argument", 2),), {}),
        ((("output", 0),), {}),
        ((("lookup", (5, {})),), {}),
        ((X,) * 33, {}),
        ((X,), {"outputs": ((3, 0, 1, (), None),)}),
        ((X,), {"outputs": ((0, 0, 1, ((0, 0, 0, -1),), None),)}),
        ((X,), {"outputs": (LIKE_X,) * 6}),
        ((X,), {"outputs": ((0, 5, 1, (), None),)}),
        ((X,), {"tensors": (7,)}),
        ((X,), {"contiguous": (7,)}),
        ((X,), {"ranks": ((7, 1),)}),
        ((X,), {"equals": ((0, 1, 7),)}),
        ((X,), {"absent": (7,)}),
    ],
)
def test_wrong_descriptions_are_refused(slots, options):
    with pytest.raises(ValueError, match="^EagerCall: "):
        made(Launch(), slots, count=2, **options)


def test_outputs_without_a_launch():
    launch, x = Launch(), torch.zeros(3, 8)
    call = made(launch, (X,), count=2, outputs=(LIKE_X, LIKE_X))
    first, second = call.outputs(x, None)
    assert first.shape == second.shape == x.shape and first is not second
    assert launch.calls == []
    assert call.outputs(x.requires_grad_(), None) is None
    assert call.outputs(x) is None and call.outputs(torch.tensor(1.0), None) is None
    assert made(launch, (X,), count=2).outputs(x, None) is None


@pytest.mark.parametrize("results", [1, 2])
def test_into_given_results(results):
    """The results come first, and are returned."""
    launch, x = Launch(), torch.zeros(3, 8)
    places = tuple(range(1, 1 + results))
    slots = (X, *(("argument", place) for place in places))
    call = made(launch, slots, count=2 + results, tensors=(0, *places), mutated=places)
    into = _C.EagerInto(call, results, fallback)
    outs = tuple(torch.zeros(3, 8) for _ in places)
    out = outs[0] if results == 1 else outs
    assert into(out, x, None) is out and launch.calls == [(x, *outs)]
    assert [t._version for t in outs] == [1] * results
    # Python has the errors, and takes lists.
    others = [(out,), (out, x), (out, x, None, None)]
    others += [] if results == 1 else [(list(outs), x, None), (outs[0], x, None)]
    for args in others:
        assert into(*args)[0] == "fallback"
    assert len(launch.calls) == 1
    with pytest.raises(TypeError, match="must be an EagerCall"):
        _C.EagerInto(launch, results, fallback)
    with pytest.raises(ValueError, match="number of results"):
        _C.EagerInto(call, 9, fallback)


def test_a_failed_launch_into_given_results():
    launch = Launch(RuntimeError("no"))
    call = made(launch, (X,), count=3, tensors=(0, 1), mutated=(1,))
    out = torch.zeros(2)
    with pytest.raises(RuntimeError, match="no"):
        _C.EagerInto(call, 1, fallback)(out, torch.zeros(2), None)
    alive = weakref.ref(out)
    launch.calls.clear()
    launch.error.__traceback__ = None
    del out
    gc.collect()
    assert alive() is None


def test_as_the_dispatcher_calls():
    """Trailing default values are left out, and results come by name."""
    launch, x, out = Launch(), torch.zeros(3, 8), torch.zeros(3, 8)
    arguments = tuple(("argument", place) for place in range(4))
    call = made(launch, arguments, count=5, tensors=(0, 3), mutated=(3,))

    def in_python(*args, **named):
        return ("left to Python", args, named)

    names, defaults = ("x", "a", "b", "out", "backend"), (..., 1, 2, ..., None)
    filled = _C.EagerFilled(call, names, defaults, 1, in_python)
    for args in [(x,), (x, 1), (x, 1, 2), (x, 1, 2, None)]:
        assert filled(*args, out=out) is None
    assert launch.calls == [(x, 1, 2, out)] * 4
    assert filled(x, 7, 8, "sm90", out=out) is None and launch.calls[-1] == (x, 7, 8, out)
    # Compiled graphs pass optional arguments by name, which need not be the very same str.
    later = {"".join(["b", ""]): 9, "".join(["back", "end"]): None, "out": out}
    assert filled(x, **later) is None and launch.calls[-1] == (x, 1, 9, out)
    assert filled(a=3, x=x, out=out) is None and launch.calls[-1] == (x, 3, 2, out)
    # The backend goes on, too.
    assert filled(x, 1, 2, "ref", out=out) == ("fallback", x, 1, 2, out, "ref")
    assert len(launch.calls) == 7
    for args, named in [
        ((x,), {}),
        ((), {"out": out}),
        ((x,), {"out": out, "other": out}),
        ((x, 1), {"a": 1, "out": out}),
        ((x, 1, 2, None), {"backend": None, "out": out}),
        ((x, 1, 2, None, 3), {"out": out}),
    ]:
        assert filled(*args, **named) == ("left to Python", args, named)
    assert len(launch.calls) == 7
    with pytest.raises(TypeError, match="must be an EagerCall"):
        _C.EagerFilled(launch, ("x",), (...,), 0, fallback)
    for wrong in [(names[1:], defaults, 1), (names, defaults[1:], 1), (names, defaults, 4)]:
        with pytest.raises(ValueError, match="number of names, defaults"):
            _C.EagerFilled(call, *wrong, fallback)
    with pytest.raises(ValueError, match="a name is no str"):
        _C.EagerFilled(call, (*names[1:], 1), defaults, 1, fallback)


def test_in_the_place_of_an_operator():
    launch, x = Launch(), torch.zeros(3, 8)
    call = made(launch, (X, ("argument", 1)), count=3)

    def operator(*args, **named):
        """The operator's."""
        return ("dispatched", args, named)

    names, defaults = ("x", "number", "backend"), (..., 1, None)
    stand_in = _C.EagerFilled(call, names, defaults, 0, operator, stands_in=True)
    assert stand_in(x) is None and stand_in(x, 2, "sm90") is None
    assert stand_in(x, number=3, backend=None) is None
    assert [args for _, *args in launch.calls] == [[1], [2], [3]]
    # Every other call goes on as it came.
    others = [((x,), {"other": 2}), ((x, 2, "ref"), {}), (([x], 2), {}), ((), {})]
    with_grad = x.clone().requires_grad_()
    for args, named in [*others, ((with_grad, 3), {})]:
        assert stand_in(*args, **named) == ("dispatched", args, named)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert stand_in(x) == ("dispatched", (x,), {})
    assert len(launch.calls) == 3
    with torch.no_grad():
        assert stand_in(with_grad) is None and len(launch.calls) == 4
    assert hash(stand_in) == hash(operator) and stand_in.__doc__ == operator.__doc__
