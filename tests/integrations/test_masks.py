# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="tiercel" with each mask that transformers makes, against all scores in
float64."""

import types
import warnings

import pytest
import torch
import transformers
from support.tiny_models import config
from transformers import masking_utils as masks

import tiercel
import tiercel.integrations.transformers
from tiercel.core import selection
from tiercel.integrations.transformers.attention import attention_forward
from tiercel.integrations.transformers.masks import Mask

pytestmark = pytest.mark.torch

B, H, HK, D = 3, 4, 2, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def settings(attention, **changes):
    return config("Mistral", attn_implementation=attention, **changes)


def padding(kind, length):
    """Different in each row; one row has none."""
    mask = torch.ones(B, length, dtype=torch.long)
    if kind in ("left", "both"):
        mask[0, :3], mask[1, :5] = 0, 0
    if kind in ("right", "both"):
        mask[1, -2:], mask[2, -4:] = 0, 0
    if kind == "holes":
        mask[0, :2], mask[1, 4:6] = 0, 0
    return None if kind is None else mask


def cache_of(kind, past, config, device):
    """A cache of one layer with `past` tokens, and a function that adds new ones."""
    if kind is None:
        return None
    if kind == "dynamic":
        cache = transformers.DynamicCache(config=config)
    else:
        cache = transformers.StaticCache(config=config, max_cache_len=32)
    if past:
        generator = torch.Generator().manual_seed(5)
        old = torch.randn(2, B, HK, past, D, generator=generator).to(device, torch.bfloat16)
        cache.update(old[0], old[1], 0)
    return cache


def expected(q, k, v, seen, softcap=None, sinks=None):
    q, k, v = q.double(), *(x.double().repeat_interleave(H // HK, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * D**-0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.double().view(1, -1, 1, 1).expand(B, -1, q.shape[2], 1)], 3
        )
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ v).transpose(1, 2)


def compare(
    create,
    device,
    length=13,
    kind=None,
    pad=None,
    past=0,
    positions=None,
    falls_back=False,
    options=None,
    changes=None,
    **more,
):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(B, heads, length, D, generator=generator).to(device, torch.bfloat16)
        for heads in (H, HK, HK)
    )
    given = padding(pad, past + length)
    made = {}
    for attention in ("tiercel", "sdpa"):
        own = settings(attention, **(changes or {}))
        cache = cache_of(kind, past, own, device)
        skip = {} if attention == "tiercel" else more
        made[attention] = create(
            config=own,
            inputs_embeds=torch.empty(B, length, 8, dtype=torch.bfloat16, device=device),
            attention_mask=None if given is None else given.to(device),
            past_key_values=cache,
            position_ids=None if positions is None else positions.to(device),
            **skip,
        )
    if cache is not None:
        k, v = cache.update(k, v, 0)
    module = types.SimpleNamespace(is_causal=True, num_key_value_groups=H // HK)
    selection._warned.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out, weights = attention_forward(module, q, k, v, made["tiercel"], **(options or {}))
    assert weights is None
    assert falls_back == any('"tiercel"' in str(warning.message) for warning in seen)
    if device == "cuda" and not falls_back:
        assert not [w for w in seen if w.category is tiercel.FallbackWarning]
    options = options or {}
    right = expected(q, k, v, made["sdpa"], options.get("softcap"), options.get("s_aux"))
    real = made["sdpa"].any(-1).expand(B, 1, length)[:, 0]
    if given is not None:
        real = real & given[:, past:].bool().to(device)
    torch.testing.assert_close(out[real].double(), right[real], rtol=2e-2, atol=1.5e-2)


CAUSAL, SLIDING = masks.create_causal_mask, masks.create_sliding_window_causal_mask
NO_SKIP = {"allow_is_causal_skip": False}
PACKED = torch.cat([torch.arange(4), torch.arange(7), torch.arange(2)])[None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [None, "left", "right", "both"])
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_prompts(create, pad, device):
    compare(create, device, pad=pad, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_holes_in_a_padding_mask_go_to_sdpa(create, device):
    compare(create, device, pad="holes", falls_back=True, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
@pytest.mark.parametrize("rows", [1, B])
def test_packed_sequences(create, rows, device):
    compare(create, device, positions=PACKED.expand(rows, -1), **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_rows_packed_in_different_ways(create, device):
    others = torch.stack([torch.arange(13), PACKED[0], PACKED[0].roll(0)])
    others[2] = torch.cat([torch.arange(1), torch.arange(12)])
    compare(create, device, positions=others, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [None, "left", "holes"])
@pytest.mark.parametrize("past", [0, 3, 17])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_one_query(create, kind, past, pad, device):
    if past == 0 and pad is not None:
        pytest.skip("no row would be left")
    compare(create, device, length=1, kind=kind, past=past, pad=pad, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("past", [0, 3, 17])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_several_queries_over_a_cache(create, kind, past, device):
    compare(create, device, length=5, kind=kind, past=past, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_several_queries_over_a_padded_cache_go_to_sdpa(kind, device):
    compare(CAUSAL, device, length=5, kind=kind, past=9, pad="left", falls_back=True, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("past", [0, 9])
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_softcap_and_sinks(create, past, device):
    sinks = torch.linspace(-1, 2, H, dtype=torch.bfloat16, device=device)
    for options in ({"softcap": 2.0}, {"s_aux": sinks}, {"softcap": 2.0, "s_aux": sinks}):
        for length in (1, 13):
            kind = "dynamic" if past else None
            compare(create, device, length=length, kind=kind, past=past, options=options, **NO_SKIP)
    compare(create, device, pad="left", options={"s_aux": sinks}, **NO_SKIP)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"s_aux": 1.0}])
def test_softcap_and_sinks_of_packed_sequences(create, options, device):
    if "s_aux" in options:
        options = {"s_aux": torch.linspace(-1, 2, H, dtype=torch.bfloat16, device=device)}
    compare(create, device, positions=PACKED.expand(B, -1), options=options, **NO_SKIP)


def test_softcap_of_packed_sequences_in_float16():
    q, k, v = (torch.randn(1, heads, 13, D).half() for heads in (H, HK, HK))
    starts = torch.tensor([0, 4, 13], dtype=torch.int32)
    mask = Mask({}, causal=True, sequences=starts, longest=9)
    with warnings.catch_warnings(), tiercel.use_backend("ref"):
        warnings.simplefilter("error")  # as a model's own attention gives
        out, _ = attention_forward(torch.nn.Module(), q, k, v, mask, softcap=2.0)
    rows = [x[0].transpose(0, 1).double() for x in (q, k, v)]
    due = tiercel.ref.attention_varlen(*rows, starts, starts, 9, 9, causal=True, softcap=2.0)
    torch.testing.assert_close(out[0].double(), due, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("positions", [None, PACKED.expand(B, -1)])
@pytest.mark.parametrize("create", [CAUSAL, SLIDING])
def test_gradients_of_sinks(monkeypatch, create, positions):
    """Prompts with sinks are one call of the op, through which their gradients flow."""
    name = "attention" if positions is None else "attention_varlen"
    op, given = getattr(tiercel, name), []

    def spy(*args, **options):
        given.append(options["sinks"].dtype)
        return op(*args, **options)

    monkeypatch.setattr(tiercel, name, spy)
    generator = torch.Generator().manual_seed(4)
    q, k, v, grad = (
        torch.randn(B, heads, 13, D, generator=generator).bfloat16() for heads in (H, HK, HK, H)
    )
    sinks = torch.linspace(-1, 2, H, dtype=torch.bfloat16)
    made = [
        create(
            config=settings(attention),
            inputs_embeds=torch.empty(B, 13, 8, dtype=torch.bfloat16),
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
            **skip,
        )
        for attention, skip in (("tiercel", {}), ("sdpa", NO_SKIP))
    ]
    module = types.SimpleNamespace(is_causal=True, num_key_value_groups=H // HK)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out, _ = attention_forward(module, *leaves[:3], made[0], s_aux=sinks)
    found = torch.autograd.grad(out, leaves, grad.transpose(1, 2))
    assert given == [torch.float32]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    right = expected(*doubles[:3], made[1], None, doubles[3])
    truth = torch.autograd.grad(right, doubles, grad.transpose(1, 2).double())
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() < 2e-2 * other.norm()


def test_chunks_and_blocks_go_to_sdpa():
    compare(
        masks.create_chunked_causal_mask,
        "cpu",
        changes={"attention_chunk_size": 5},
        falls_back=True,
        **NO_SKIP,
    )
    blocks = torch.tensor([[-1, 0, 0, 0] + [-1] * 9]).expand(B, -1)
    both_ways = lambda **kwargs: CAUSAL(block_sequence_ids=blocks, **kwargs)  # noqa: E731
    compare(both_ways, "cpu", falls_back=True, **NO_SKIP)


def test_masks_of_the_callers_own_go_to_sdpa():
    odd = lambda b, h, q, k: (k % 2 == 0) | (k == q)  # noqa: E731
    create = lambda **kwargs: CAUSAL(and_mask_function=odd, **kwargs)  # noqa: E731
    compare(create, "cpu", falls_back=True, **NO_SKIP)


def test_a_model_that_works_on_its_mask_gets_a_tensor():
    given = {"inputs_embeds": torch.empty(B, 5, 8), "attention_mask": None, "past_key_values": None}
    assert isinstance(CAUSAL(config=settings("tiercel"), **given), Mask)
    mask = CAUSAL(config=settings("tiercel"), **given, allow_is_causal_skip=False)
    assert mask.dtype == torch.bool and mask.shape == (B, 1, 5, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [None, "right"])
def test_both_directions(pad, device):
    create = masks.create_bidirectional_mask
    skip = {"allow_is_bidirectional_skip": False}
    compare(create, device, pad=pad, falls_back=pad is not None, **skip)
    create = masks.create_bidirectional_sliding_window_mask
    compare(create, device, pad=pad, falls_back=True, **skip)


def test_no_mask_is_as_in_sdpa():
    """Query i stands at key i, unless there is one query."""
    theirs = transformers.AttentionInterface()["sdpa"]
    q, k = torch.randn(B, H, 5, D).bfloat16(), torch.randn(B, HK, 9, D).bfloat16()
    for causal in (None, True, False):
        for queries in (1, 5):
            module = torch.nn.Module()
            module.is_causal, module.num_key_value_groups = True, H // HK
            given = (module, q[:, :, :queries], k, k, None)
            ours, right = (f(*given, is_causal=causal)[0] for f in (attention_forward, theirs))
            torch.testing.assert_close(ours, right, rtol=2e-2, atol=1.5e-2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float32}, "not float32"),
        ({"dim": 12}, "a head dimension of 12"),
        ({"v_dim": 12}, "a head dimension of 12"),
        ({"dropout": 0.5}, "dropout"),
        ({"position_bias": torch.zeros(1, H, 5, 5, dtype=torch.bfloat16)}, "`position_bias`"),
        ({"mask": torch.ones(B, 1, 5, 5, dtype=torch.bool)}, "a mask of all scores"),
    ],
)
def test_sdpa_runs_what_is_lacking_and_one_warning_says_so(change, why):
    change = dict(change)
    dtype, dim = change.pop("dtype", torch.bfloat16), change.pop("dim", D)
    mask, v_dim = change.pop("mask", None), change.pop("v_dim", dim)
    q, k, v = (
        torch.randn(B, heads, 5, size).to(dtype)
        for heads, size in ((H, dim), (HK, dim), (HK, v_dim))
    )
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, H // HK
    torch.manual_seed(3)
    with pytest.warns(tiercel.FallbackWarning, match=why):
        ours = attention_forward(module, q, k, v, mask, **change)[0]
    torch.manual_seed(3)
    right = transformers.AttentionInterface()["sdpa"](module, q, k, v, mask, **change)[0]
    torch.testing.assert_close(ours, right)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tiercel.FallbackWarning)
        attention_forward(module, q, k, v, mask, **change)


def test_strict(monkeypatch):
    monkeypatch.setenv("TIERCEL_STRICT", "1")
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match="so sdpa does not stand in"):
        attention_forward(torch.nn.Module(), q, q, q, None)


def test_autocast():
    q = torch.randn(1, 2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention_forward(torch.nn.Module(), q, q, q, None)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("length", [1, 5])
def test_to_a_model_that_works_on_it_a_mask_is_a_tensor(length):
    given = {"inputs_embeds": torch.empty(B, length, 8), "attention_mask": None}
    given["past_key_values"] = None
    mask = CAUSAL(config=settings("tiercel"), **given)
    right = torch.ones(B, 1, length, length, dtype=torch.bool).tril()
    assert isinstance(mask, Mask)
    assert mask.dtype == torch.bool and mask.shape == right.shape and mask.device == right.device
    scores = torch.randn(B, H, length, length)
    hidden = torch.tensor(-1.0)
    for found, due in (
        (mask[:, :, :, :3], right[:, :, :, :3]),
        (mask.to(torch.float32), right.float()),
        (mask.logical_not(), ~right),
        (scores.masked_fill(mask, 0.0), scores.masked_fill(right, 0.0)),
        (torch.where(mask, scores, other=hidden), torch.where(right, scores, hidden)),
    ):
        assert torch.equal(found, due)
    with pytest.raises(AttributeError, match="'Mask' object has no attribute '_missing'"):
        mask._missing  # noqa: B018
    assert isinstance(mask.to("cpu", torch.bool), Mask)


def test_a_model_whose_attention_changes_the_mask():
    """Doge's attention makes a mask of all scores of the one that it gets."""
    settings = transformers.DogeConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attn_implementation="eager",
        keep_window_size=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(settings).eval().bfloat16()
    ids = torch.randint(3, 96, (2, 9))
    with torch.no_grad():
        right = model(ids).logits
        model.set_attn_implementation("tiercel")
        with pytest.warns(tiercel.FallbackWarning, match="a mask of all scores"):
            found = model(ids).logits
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


def test_a_mask_moves_to_other_devices():
    given = {"inputs_embeds": torch.empty(B, 1, 8), "past_key_values": None}
    mask = CAUSAL(config=settings("tiercel"), attention_mask=None, **given)
    assert mask.to("meta", non_blocking=True).places.device.type == "meta"
    assert mask.places.device.type == "cpu"
