# SPDX-License-Identifier: Apache-2.0
"""fused_moe of few tokens, float8 weights, in one launch on an H100 or H200, against float64."""

import pytest
import torch
from torch.nn import functional

import tiercel
from tiercel.ops.moe.fused import run, run_single_launch, single_launch_plan
from tiercel.ops.moe.tiling import SINGLE_LAUNCH, choose

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

ACTIVATIONS = {
    "silu": lambda a, b: functional.silu(a) * b,
    "gelu": lambda a, b: functional.gelu(a) * b,
    "relu": lambda a, b: functional.relu(a) * b,
    "gelu_residual": lambda a, b: functional.gelu(a) * (b + 1),
}
KINDS = ("rows", "experts", "blocks")


def float8(w, of):
    """Of each expert apart: all at once would take as much memory again, in float32."""
    values, scales = torch.empty_like(w, dtype=torch.float8_e4m3fn), []
    for expert, value in enumerate(w):
        wide = value.float()
        if of == "blocks":
            rows, columns = (size // 128 for size in w.shape[1:])
            scale = wide.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        else:
            spread = (
                wide.abs().amax(1, True) if of == "rows" else wide.abs().amax()[None, None]
            ) / 448
            scale = spread.flatten()
        values[expert] = (wide / spread).to(values.dtype)
        scales.append(scale)
    return values, torch.stack(scales)


class Problem:
    def __init__(self, kind="rows", tokens=4, experts=8, k=4, hidden=512, inner=256, index=None):
        generator = torch.Generator("cuda").manual_seed(tokens * 1000 + k)

        def random(*shape):
            value = torch.randn(*shape, device="cuda", generator=generator).bfloat16()
            return value if len(shape) == 2 else value.mul_(shape[-1] ** -0.5)

        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        self.x = random(tokens, hidden)
        up, down = random(experts, 2 * inner, hidden), random(experts, hidden, inner)
        self.weights = (float8(up, kind), float8(down, kind))
        self.factors = torch.rand(tokens, k, device="cuda", generator=generator)
        self.ids = scores.topk(k).indices.to(index or torch.int32)

    def few(self, activation="silu"):
        return run_single_launch(self.x, self.weights, self.factors, self.ids, activation)

    def call(self, **options):
        (up, up_scale), (down, down_scale) = self.weights
        scales = {"w_up_scale": up_scale, "w_down_scale": down_scale}
        return tiercel.fused_moe(self.x, up, down, self.factors, self.ids, **scales, **options)

    def ordinary(self, activation="silu"):
        down, scale = self.weights[1]
        choice = choose(down, self.ids, None, scale.ndim == 3, allow_single_launch=False)
        given = (self.x, self.weights, self.factors, self.ids, activation, None)
        return run(*given, choice)

    def due(self, activation="silu"):
        """In float64, with rows quantised."""
        (up, up_scale), (down, down_scale) = self.weights
        used, ids = self.ids.unique(return_inverse=True)
        there = (used >= 0) & (used < down.shape[0])
        place = used.clamp(0, down.shape[0] - 1).long()
        scales = {"w_up_scale": up_scale[place], "w_down_scale": down_scale[place]}
        used = [w.view(torch.uint8)[place].view(w.dtype) for w in (up, down)]
        factors = self.factors.double() * there[ids]
        return tiercel.ref.fused_moe(
            self.x.double(), *used, factors, ids, activation=activation, **scales
        )

    def check(self, result=None, activation="silu"):
        result = self.few(activation) if result is None else result
        due = self.due(activation)
        # A value between the halves may be rounded to float8's neighbour.
        error = (result.double() - due).square().mean().sqrt()
        assert error < 2.5e-2 * due.square().mean().sqrt()
        rows = (result.double() - due).square().mean(1).sqrt()
        assert (rows < 5e-2 * due.square().mean(1).sqrt() + 1e-9).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8])
def test_tokens(kind, tokens):
    problem = Problem(kind, tokens)
    result = problem.few()
    problem.check(result)
    if tokens <= 4:
        assert torch.equal(problem.call(), result)  # this is what it takes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(kind, activation):
    problem = Problem(kind)
    problem.check(activation=activation)
    near = problem.ordinary(activation).double()
    error = (problem.few(activation).double() - near).square().mean().sqrt()
    assert error < 2.5e-2 * near.std()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "hidden", "inner"),
    [
        (1, 64, 8, 2048, 1024),
        (4, 64, 8, 2048, 768),
        (1, 128, 1, 1024, 256),
        (4, 128, 8, 1024, 768),
        (4, 8, 2, 2304, 1024),  # more than a tile of H a multiprocessor
        (16, 8, 2, 1024, 256),
        (32, 8, 1, 1024, 256),
        (2, 16, 8, 2048, 128),
    ],
)
def test_sizes(kind, tokens, experts, k, hidden, inner):
    Problem(kind, tokens, experts, k, hidden, inner).check()


@pytest.mark.sanitize
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "inner"), [(128, 128), (384, 128), (128, 640), (2176, 1408), (1280, 896)]
)
def test_odd_sizes(kind, hidden, inner):
    Problem(kind, 3, 8, 2, hidden, inner).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(4096, 1024), (4096, 768), (1024, 14336)])
def test_sizes_that_take_several_launches(kind, hidden, inner):
    problem = Problem(kind, 2, 8, 2, hidden, inner)
    with pytest.raises(
        NotImplementedError, match="must leave room in shared|must be smaller for a single"
    ):
        problem.few()
    problem.check(problem.call())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_ids_of_none_and_the_same_ones(kind, index):
    problem = Problem(kind, 4, 8, 8, index=index)
    problem.ids[1, :] = 5  # a token to one expert, eight times, and another's
    problem.ids[2, :7] = 5
    problem.ids[0, 3], problem.ids[2, 7] = -1, 8
    problem.check()
    problem.ids[:] = 5
    problem.check()
    problem.ids[3] = 99
    result = problem.few()
    problem.ids[3] = 5
    problem.factors[3] = 0
    problem.check(result)
    assert not result[3].any()
    problem.ids[:] = -1 if index == torch.int32 else 2**32 + 1
    assert not problem.few().any()


@pytest.mark.parametrize("k", [4, 8])
def test_nan_and_infinity_stay_in_their_token(k):
    """Of 32 ids a value says by its bits whether it is there."""
    for kind in KINDS:
        problem = Problem(kind, k=k)
        clean = problem.few()
        problem.x[1, 7], problem.x[3, 0] = float("nan"), float("inf")
        dirty = problem.few()
        assert dirty[1].isnan().all() and not dirty[3].isfinite().all()
        assert torch.equal(dirty[::2], clean[::2])


def test_strided():
    problem = Problem()
    due = problem.few()
    problem.x = torch.cat([problem.x, problem.x], 1)[:, :512]
    (up, scale), down = problem.weights
    apart = torch.zeros(8, 520, 512, dtype=up.dtype, device="cuda")
    apart[:, :512] = up
    problem.weights = ((apart[:, :512], scale), down)
    assert torch.equal(problem.few(), due)
    apart = torch.zeros(8, 512, 528, dtype=up.dtype, device="cuda")
    apart[:, :, :512] = up  # rows apart: in several launches
    problem.weights = ((apart[:, :, :512], scale), down)
    with pytest.raises(NotImplementedError, match="`w_up` must have an expert's rows one behind"):
        problem.few()
    problem.check(problem.call())


@pytest.mark.parametrize("kind", KINDS)
def test_graph_with_other_ids(kind):
    problem = Problem(kind, 4, 64, 8, 1024, 256)
    problem.few()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = problem.call()
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        scores = torch.rand(4, 64, device="cuda", generator=generator)
        problem.ids.copy_(scores.topk(8).indices)
        if seed == 3:
            problem.ids[:, 2:] = -1
        result.fill_(3.0)
        graph.replay()
        problem.check(result)
        assert torch.equal(problem.few(), result)


def test_two_streams_at_once():
    problems = [Problem("blocks", 4, 64, 8, 1024, 256), Problem("rows", 1, 64, 8, 2048, 512)]
    due = [problem.few() for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(100):
        for problem, stream, found in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(problem.few())
    torch.cuda.synchronize()
    for found, one in zip(results, due, strict=True):
        assert all(torch.equal(result, one) for result in found)


def test_a_graph_beside_calls_on_another_stream():
    problems = [Problem("blocks", 4, 64, 8, 1024, 256), Problem("rows", 2, 64, 8, 2048, 512)]
    due = [problem.few() for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    graph, captured = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=streams[0]):
        for _ in range(5):
            captured.append(problems[0].few())
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        with torch.cuda.stream(streams[1]):
            found += [problems[1].few() for _ in range(5)]
    torch.cuda.synchronize()
    assert all(torch.equal(result, due[0]) for result in captured)
    assert all(torch.equal(result, due[1]) for result in found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_every_time(kind):
    problem = Problem(kind, 4, 64, 8, 1024, 512)
    first = problem.few()
    same = torch.stack([(problem.few() == first).all() for _ in range(500)])
    assert same.all()


def test_compiled():
    problem = Problem("rows")
    compiled = torch.compile(problem.call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(), problem.few())


def test_what_is_chosen():
    problem = Problem()
    assert choose(problem.weights[1][0], problem.ids, None, False) is SINGLE_LAUNCH
    explained = single_launch_plan(problem.x, problem.weights, problem.factors, problem.ids, "silu")
    assert explained["kernel"] == "fused_moe_few_tokens<Rows>"
    many = Problem(tokens=9)
    assert choose(many.weights[1][0], many.ids, None, False) is not SINGLE_LAUNCH
    more = Problem(tokens=5)
    assert choose(more.weights[1][0], more.ids, None, False) is not SINGLE_LAUNCH
    more.check()  # which the kernel takes all the same
    with pytest.raises(NotImplementedError, match="`topk_ids` must have 1 to 32 elements for a"):
        many.few()
