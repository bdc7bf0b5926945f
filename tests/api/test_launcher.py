# SPDX-License-Identifier: Apache-2.0
"""tiercel._C.Launcher: outputs and launch without Python, and what it leaves to Python."""

import gc
import weakref

import pytest
import torch

from tiercel import _eager  # noqa: F401  (hands torch to _C)
from tiercel._launcher import Argument, Choice, Like, Output, launcher

pytestmark = pytest.mark.torch
X = Argument(0)


class Launch:
    """Keeps what it was called with."""

    def __init__(self, error=None):
        self.calls = []
        self.error = error

    def __call__(self, *args):
        self.calls.append(args)
        if self.error is not None:
            raise self.error


def otherwise(*args):
    return ("otherwise", *args)


def made(launch, takes, **options):
    return launcher(launch, takes, otherwise=otherwise, **options)


@pytest.mark.parametrize("shape", [(3, 8), (), (0, 4), (2, 3, 4), (1,) * 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_an_output_like_an_argument(shape, dtype):
    launch, x = Launch(), torch.zeros(shape, dtype=dtype)
    run = made(
        launch, (X, None, Output(0), 7, Argument(1)), count=3, dense=(X,), outputs=(Like(X),)
    )
    out = run(x, 1.5, None)
    assert (out.shape, out.dtype, out.is_contiguous()) == (x.shape, dtype, True)
    assert launch.calls == [(x, None, out, 7, 1.5)] and launch.calls[0][2] is out


def test_divided_of_another_dtype_and_two():
    launch, x = Launch(), torch.zeros(3, 8)
    outputs = (Like(X, 2, torch.float16), Like(X))
    pair = made(launch, (Output(1), Output(0)), count=2, outputs=outputs)(x, None)
    assert isinstance(pair, tuple) and [t.shape for t in pair] == [(3, 4), (3, 8)]
    assert [t.dtype for t in pair] == [torch.float16, torch.float32]
    assert launch.calls[0][0] is pair[1] and launch.calls[0][1] is pair[0]


def test_of_several_arguments_dimensions():
    launch, x, weight = Launch(), torch.zeros(3, 8).t(), torch.zeros(5, 8)
    like = Like(X, rank=2, dims=((0, 0), (1, 0)))
    run = made(launch, (X, Argument(1), Output(0)), count=3, outputs=(like,))
    assert run(x, weight, None).shape == (8, 5)
    assert run(x[None], weight, None)[0] == "otherwise"
    assert run(x, torch.tensor(1), None)[0] == "otherwise"
    assert len(launch.calls) == 1


def test_no_output():
    launch, x = Launch(), torch.zeros(3)
    assert made(launch, (X,), count=2)(x, None) is None and launch.calls == [(x,)]


@pytest.mark.parametrize(
    ("key", "index"), [("a", 1), ("b", 2), ("c", None), (1, 3), (True, None), ([], None)]
)
def test_choices(key, index):
    launch = Launch()
    run = made(launch, (Choice(1, {"a": 1, "b": 2, 1: 3}),), count=3)
    result = run(torch.zeros(1), key, None)
    assert launch.calls == ([] if index is None else [(index,)])
    assert (result is None) == (index is not None)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(4, 8).t(),
        torch.zeros(4, 8)[:, ::2],
        torch.zeros(4, 8)[:, :7],
        torch.zeros(4, 7),  # cannot be halved
        torch.tensor(1.0),
        torch.zeros(4, 8).as_subclass(Subclass),
        torch.zeros(4, 8, device="meta"),
        "no tensor",
        None,
    ],
    ids=str,
)
def test_the_rest_is_left_to_python(x):
    launch = Launch()
    run = made(launch, (X, Output(0)), count=2, dense=(X,), outputs=(Like(X, 2),))
    result = run(x, None)
    assert result[0] == "otherwise" and result[1] is x and not launch.calls
    assert run(x, None, 3) == ("otherwise", x, None, 3)


def test_an_error_of_the_launch_drops_the_outputs():
    launch = Launch(ValueError("no"))
    run = made(launch, (X, Output(0)), count=2, outputs=(Like(X),))
    with pytest.raises(ValueError, match="no"):
        run(torch.zeros(3), None)
    out = weakref.ref(launch.calls.pop()[1])
    launch.error.__traceback__ = None  # its frames hold what was passed
    gc.collect()
    assert out() is None


@pytest.mark.parametrize(
    ("takes", "options"),
    [
        ((Argument(2),), {}),
        ((Output(0),), {}),
        ((Choice(5, {}),), {}),
        ((X,) * 17, {}),
        ((X,), {"outputs": (Like(3),)}),
        ((X,), {"outputs": (Like(0, 0),)}),
        ((X,), {"outputs": (Like(0),) * 3}),
        ((X,), {"outputs": (Like(0, rank=1, dims=((2, 0),)),)}),
    ],
)
def test_what_cannot_be_made(takes, options):
    with pytest.raises(ValueError, match="^Launcher: "):
        made(Launch(), takes, count=2, **options)
