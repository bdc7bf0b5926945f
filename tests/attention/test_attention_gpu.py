# SPDX-License-Identifier: Apache-2.0
"""attention on an H100 or H200, against float64: every kernel, ragged sizes, strides, graphs."""

import pytest
import torch

import tiercel

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]

DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def make():
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(batch, seq_q, seq_k, heads, kv_heads, d, dtype=torch.bfloat16, d_v=None):
        def rand(length, count, d=d):
            shape = (batch, length, count, d)
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        return rand(seq_q, heads), rand(seq_k, kv_heads), rand(seq_k, kv_heads, d_v or d)

    return draw


def assert_right(result, lse, q, k, v, **options):
    """Probabilities and result are rounded once each, by half a unit in the last place; sums are of
    float32, and values are about 1. A row with few keys is off by most."""
    truth, sums = tiercel.ref.attention(
        q.double(), k.double(), v.double(), return_lse=True, **options
    )
    unit = torch.finfo(q.dtype).eps / 2
    error = (result.double() - truth).abs()
    assert error.max() <= 8 * unit, error.max().item() / unit
    rms = error.square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-9)
    assert rms <= 2.5 * unit, rms.item() / unit
    if lse is not None:
        torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=2e-5)


def check(tensors, **options):
    result, lse = tiercel.attention(*tensors, return_lse=True, **options)
    assert_right(result, lse, *tensors, **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_small(make, dtype, d, causal):
    for sizes in [(1, 1, 1, 1, 1), (2, 130, 130, 2, 1), (1, 200, 300, 3, 3), (2, 65, 20, 4, 2)]:
        check(make(*sizes, d, dtype), causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 63, 64, 127, 129, 192, 193, 511, 512, 1000])
@pytest.mark.parametrize("seq_k", [1, 8, 127, 128, 129, 256, 300, 513, 1024, 2047])
def test_ragged(make, d, causal, seq_q, seq_k):
    check(make(2, seq_q, seq_k, 4, 2, d), causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 2), (6, 1), (32, 8)])
def test_heads_and_many_tiles(make, d, causal, heads):
    check(make(5, 700, 700, *heads, d), causal=causal)
    check(make(1, 4096, 4096, *heads, d, torch.float16), causal=causal)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("positive", [(0, 0), (0, 300), (700, 1100)])
def test_scores_of_one_sign(make, d, positive):
    """Floats below 0 do not compare as integers do."""
    q, k, v = make(2, 1100, 1100, 4, 2, d)
    k = -k.float().abs()
    k[:, slice(*positive)] *= -1
    check((q.float().abs().to(q.dtype), k.to(q.dtype), v))


WINDOWS = [(0, 0), (5, 0), (None, 7), (100, 30), (200, None), (1, 1), (None, None), (4096, 0)]


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("window", WINDOWS)
def test_window(make, d, window):
    for sizes in [(1, 130, 130, 2, 2), (2, 500, 130, 4, 2)]:
        check(make(*sizes, d), window=window)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("window", WINDOWS)
def test_window_over_many_blocks(make, d, window):
    for sizes in [(2, 777, 1300, 4, 2), (1, 2050, 2050, 3, 1)]:
        check(make(*sizes, d, torch.float16), window=window)
        check(make(*sizes, d), window=window, causal=True)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 0)}])
def test_softcap(make, d, dtype, options):
    q, k, v = make(2, 300, 700, 4, 2, d, dtype)
    check((q * 3, k, v), softcap=2.5, **options)
    check((q, k, v), softcap=50.0, scale=0.3, **options)


@pytest.mark.parametrize("d", [8, 32, 40, 72, 80, 96, 120, 160, 192, 200, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_head_dimensions(make, d, causal):
    check(make(2, 300, 300, 4, 2, d), causal=causal)
    check(make(1, 1000, 1111, 2, 2, d, torch.float16), causal=causal)


@pytest.mark.sanitize
@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_small_values_of_another_head_dimension(make, options):
    check(make(2, 300, 300, 4, 2, 192, d_v=128), **options)


@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (136, 40), (128, 192), (64, 128), (256, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (100, 5)}, {"causal": True, "softcap": 30.0}]
)
def test_values_of_another_head_dimension(make, d, d_v, dtype, options):
    check(make(2, 300, 400, 4, 2, d, dtype, d_v), **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 64, 127, 129, 512, 1000])
@pytest.mark.parametrize("seq_k", [1, 127, 128, 300, 1024, 2047])
def test_ragged_narrow_values(make, causal, seq_q, seq_k):
    check(make(2, seq_q, seq_k, 4, 2, 192, d_v=128), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_narrow_values(make, causal):
    check(make(2, 1500, 1500, 32, 8, 192, d_v=128), causal=causal)


def test_strides_of_narrow_values(make):
    """Keys and values beside each other, as a projection of a latent has them."""
    q, both, _ = make(2, 300, 300, 4, 4, 320)
    check((q[..., :192], both[..., :192], both[..., 192:]), causal=True)
    out = q.new_full((2, 300, 4, 320), torch.nan)
    tiercel.attention(q[..., :192], both[..., :192], both[..., 192:], out=out[..., 64:192])
    assert out[..., :64].isnan().all() and out[..., 192:].isnan().all()
    assert out[..., 64:192].isfinite().all()


@pytest.mark.parametrize("d_v", [128, 64])
def test_gradients_of_narrow_values(make, d_v):
    tensors = [x.requires_grad_() for x in make(2, 256, 256, 4, 4, 192, d_v=d_v)]
    grad = torch.randn_like(tensors[2])
    tiercel.attention(*tensors, causal=True).backward(grad)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    tiercel.ref.attention(*doubles, causal=True).backward(grad.double())
    for tensor, double in zip(tensors, doubles, strict=True):
        error = (tensor.grad.double() - double.grad).norm() / double.grad.norm()
        assert error < 1e-2


@pytest.mark.parametrize("d", [64, 128])
def test_rows_that_see_no_key(make, d):
    q, k, v = make(2, 300, 100, 2, 2, d)
    result, lse = tiercel.attention(q, k, v, causal=True, return_lse=True)
    assert (result[:, :200] == 0).all() and (lse[:, :, :200] == -torch.inf).all()
    assert_right(result, lse, q, k, v, causal=True)


def test_no_keys_and_no_queries(make):
    q, k, v = make(2, 5, 0, 2, 2, 64)
    result, lse = tiercel.attention(q, k, v, return_lse=True)
    assert (result == 0).all() and (lse == -torch.inf).all()
    assert tiercel.attention(*make(2, 0, 5, 2, 2, 64)).shape == (2, 0, 2, 64)
    assert tiercel.attention(*make(0, 7, 5, 2, 2, 64)).shape == (0, 7, 2, 64)


@pytest.mark.parametrize("d", [64, 128])
def test_strides(make, d):
    q, k, v = make(2, 300, 300, 4, 4, d)
    packed = torch.stack([q, k, v], dim=2)  # [B, S, 3, H, D]
    views = packed.unbind(2)
    assert not views[0].is_contiguous()
    check(views, causal=True)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    expected = tiercel.attention(q, k, v)
    assert torch.equal(tiercel.attention(*heads_first), expected)
    out = torch.full_like(packed, float("nan"))
    tiercel.attention(q, k, v, out=out[:, :, 1])
    assert torch.equal(out[:, :, 1], expected) and out[:, :, 0].isnan().all()


def test_scale(make):
    tensors = make(1, 256, 256, 2, 2, 64)
    for scale in (1e-3, 0.5, 3.0):
        check(tensors, scale=scale)


def test_large_scores(make):
    q, k, v = make(1, 300, 300, 2, 2, 128)
    check((q * 20, k * 20, v), causal=True)


def test_special_values(make):
    q, k, v = make(1, 300, 300, 2, 2, 128)
    q[0, 7, 0], v[0, 0, 1, 5], v[0, 0, 1, 6] = float("nan"), float("inf"), float("nan")
    result = tiercel.attention(q, k, v, causal=True)
    assert result[0, 7, 0].isnan().all()
    clean = torch.ones_like(result, dtype=torch.bool)
    clean[0, 7, 0], clean[0, :, 1, 5:7] = False, False
    assert result[clean].isfinite().all()
    assert (result[0, :, 1, 5] == float("inf")).all() and result[0, :, 1, 6].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_more_than_2_to_31_elements(make, causal):
    q, k, v = make(2, 66_000, 1100, 128, 1, 128)
    result = tiercel.attention(q, k, v, causal=causal)
    for rows in (slice(0, 300), slice(65_700, 66_000)):
        for head in (0, 127):
            # A causal row's mask goes by its distance from the end.
            part = q[1:, rows, head : head + 1]
            if causal and rows.start == 0:
                assert (result[1, rows, head] == 0).all()
                continue
            assert_right(result[1:, rows, head : head + 1], None, part, k[1:], v[1:], causal=causal)


@pytest.mark.parametrize("d", [64, 128])
def test_first_call_inside_a_graph_capture(make, d):
    q, k, v = make(2, 500, 500, 4, 2, d)
    out = torch.empty_like(q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiercel.attention(q, k, v, causal=True, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert_right(out, None, q, k, v, causal=True)


def test_dependent_launches_see_what_went_before(make):
    q, k, v = make(1, 300, 300, 4, 4, 64)
    x = expected = q
    for _ in range(20):
        x = tiercel.attention(x, k, v)
    for _ in range(20):
        expected = tiercel.attention(expected, k, v)
        torch.cuda.synchronize()
    assert torch.equal(x, expected)


def test_on_another_stream(make):
    tensors = make(2, 600, 600, 4, 4, 128)
    expected = tiercel.attention(*tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = tiercel.attention(*tensors)
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(make, causal):
    tensors = [x.requires_grad_() for x in make(2, 256, 256, 4, 2, 64)]
    grad = torch.randn_like(tensors[0])
    tiercel.attention(*tensors, causal=causal).backward(grad)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    tiercel.ref.attention(*doubles, causal=causal).backward(grad.double())
    for tensor, double in zip(tensors, doubles, strict=True):
        error = (tensor.grad.double() - double.grad).norm() / double.grad.norm()
        assert error < 1e-2


def test_two_devices(make):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    q, k, v = make(1, 300, 300, 2, 2, 64)
    expected = tiercel.attention(q, k, v)
    result = tiercel.attention(*(x.to("cuda:1") for x in (q, k, v)))
    assert torch.equal(result.cpu(), expected.cpu())
