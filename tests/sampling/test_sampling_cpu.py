# SPDX-License-Identifier: Apache-2.0
"""sample with PyTorch and without a GPU: reference, definitions, public function."""

import math

import pytest
import torch

import tiercel
from tiercel import ref
from tiercel.ops.sampling.reference import kept_weights, penalised, philox

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("on_ref")]


def signed(value):
    return torch.tensor([value - 2**64 if value >= 2**63 else value])


@pytest.mark.parametrize(
    ("key", "counter", "stream", "due"),
    [
        (0, 0, 0, 0xE169C58D_6627E8D5),
        (2**64 - 1, 2**64 - 1, 2**64 - 1, 0x41C83B0E_408F276D),
        (0x299F31D0_A4093822, 0x85A308D3_243F6A88, 0x03707344_13198A2E, 0x94FDCCEB_D16CFE09),
    ],
)
def test_philox_has_the_known_answers(key, counter, stream, due):
    """Those of Random123, whose words are numbered from the lowest."""
    assert torch.equal(philox(signed(key), signed(counter), signed(stream)), signed(due))


def numbers(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


def kept(x, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that have weight."""
    given = (numbers(temperature), numbers(top_k, dtype=torch.int32), numbers(top_p))
    weights = kept_weights(numbers(*x)[None], *given, numbers(min_p))[0]
    return torch.nonzero(weights)[:, 0].tolist()


# Probabilities 0.4, 0.3, 0.2, 0.1 at temperature 1.
FOUR = [math.log(p) for p in (0.2, 0.4, 0.1, 0.3)]


def test_filters():
    assert kept(FOUR) == [0, 1, 2, 3]
    assert kept(FOUR, top_k=1) == [1] and kept(FOUR, top_k=3) == [0, 1, 3]
    assert kept(FOUR, top_k=4) == kept(FOUR, top_k=9) == kept(FOUR, top_k=-1) == [0, 1, 2, 3]
    assert kept(FOUR, top_p=0.3) == kept(FOUR, top_p=0.0) == [1]
    assert kept(FOUR, top_p=0.5) == kept(FOUR, top_p=0.69) == [1, 3]
    assert kept(FOUR, top_p=0.71) == [0, 1, 3]
    assert kept(FOUR, min_p=0.6) == [1, 3] and kept(FOUR, min_p=1.0) == kept(FOUR, min_p=7.0) == [1]


def test_top_p_is_a_share_of_what_the_others_leave():
    assert kept(FOUR, top_p=0.55, top_k=2) == [1]  # 4 / 7 of the two
    assert kept(FOUR, top_p=0.6, top_k=2) == [1, 3]
    assert kept(FOUR, top_p=0.43, min_p=0.4) == [1]  # 4 / 9 of the three
    assert kept(FOUR, top_p=0.46, min_p=0.4) == [1, 3]


def test_temperature_comes_first():
    assert kept(FOUR, top_p=0.5, temperature=0.1) == [1]
    assert kept(FOUR, min_p=0.2, temperature=10.0) == [0, 1, 2, 3]


def test_ties_are_kept():
    x = [1.0, 3.0, 1.0, 2.0, 2.0]
    assert kept(x, top_k=2) == kept(x, top_k=3) == [1, 3, 4]
    assert kept(x, top_p=0.6) == [1, 3, 4]
    assert kept([0.0] * 5, top_k=1) == kept([0.0] * 5, top_p=0.0) == [0, 1, 2, 3, 4]


def test_penalties():
    x = numbers(2.0, -2.0, 2.0, -2.0, 0.5)[None]
    counts = numbers(0, 2, 1, -1, 0, dtype=torch.int32)[None]
    prompt = numbers(0b01001, dtype=torch.int32)[None]
    made = penalised(x, counts, prompt, None, numbers(2.0), numbers(0.25), numbers(0.5))
    assert made.tolist() == [[1.0, -5.25, 0.25, -4.0, 0.5]]
    allowed = numbers(0b10101, dtype=torch.int32)[None]
    made = penalised(x, None, None, allowed, numbers(2.0), numbers(0.25), numbers(0.5))
    assert made.tolist() == [[2.0, -math.inf, 2.0, -math.inf, 0.5]]


def test_greedy_and_special_rows():
    inf, nan = math.inf, math.nan
    x = numbers(1, 3, 3, 0, nan, 1, 9, 0, -inf, -inf, -inf, -inf, 0, inf, inf, 5).view(4, 4)
    for temperature in (0.0, 1.0):
        tokens, logprobs = tiercel.sample(x, temperature=temperature, return_logprobs=True, top_k=1)
        assert tokens.dtype == torch.int32 and tokens[1] == tokens[2] == -1
        assert tokens[0] in (1, 2) and tokens[3] in (1, 2)
        assert logprobs.isnan().tolist() == [False, True, True, True]
    assert tiercel.sample(x, temperature=0.0).tolist() == [1, -1, -1, 1]


def test_numbers_and_tensors_are_the_same():
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    given = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "offset": 5}
    given |= {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1}
    counts = torch.randint(3, (50, 40), dtype=torch.int32)
    seeds = torch.arange(50)
    dtypes = {"top_k": torch.int32, "offset": torch.int64}
    tensors = {n: torch.full((50,), v, dtype=dtypes.get(n)) for n, v in given.items()}
    plural = {"frequency_penalty": "frequency_penalties", "presence_penalty": "presence_penalties"}
    plural["repetition_penalty"] = "repetition_penalties"
    named = {plural.get(n, n + "s"): v for n, v in tensors.items()}
    due = tiercel.sample(logits, counts=counts, seed=seeds, **given)
    assert torch.equal(tiercel.sample(logits, counts=counts, seed=seeds, **tensors), due)
    assert torch.equal(tiercel.sample(logits, counts=counts, seeds=seeds, **named), due)
    assert torch.equal(ref.sample(logits, counts=counts, seeds=seeds, **given), due)
    assert torch.equal(ref.sample(logits, counts=counts, seed=seeds, **tensors), due)


def test_seeds():
    logits = torch.zeros(300, 1000)
    one = tiercel.sample(logits, seed=3)
    assert torch.equal(one, tiercel.sample(logits, seed=3)) and len(set(one.tolist())) > 200
    assert not torch.equal(one, tiercel.sample(logits, seed=4))
    assert not torch.equal(one, tiercel.sample(logits, seed=3, offset=1))
    same = tiercel.sample(logits, seed=torch.full((300,), 3))
    assert len(set(same.tolist())) == 1 and same[0] == one[0]


def test_distribution():
    """Chi-square at a fixed seed: five standard deviations."""
    draws = 20_000
    logits = numbers(*FOUR).repeat(draws, 1)
    tokens = tiercel.sample(logits, seed=torch.full((draws,), 5), offset=torch.arange(draws))
    expected = draws * torch.tensor([0.2, 0.4, 0.1, 0.3])
    found = torch.bincount(tokens.long(), minlength=4)
    assert float(((found - expected).square() / expected).sum()) < 3 + 5 * 6**0.5


def test_logprobs_are_those_before_temperature_and_filters():
    logits = numbers(*FOUR)[None]
    tokens, logprobs = tiercel.sample(
        logits, temperature=0.3, top_k=1, return_logprobs=True, indices_dtype=torch.int64
    )
    assert tokens.dtype == torch.int64 and tokens.item() == 1
    torch.testing.assert_close(logprobs, numbers(math.log(0.4)))


def test_top_logprobs():
    logits = numbers(*FOUR, *FOUR, math.log(0.4), -math.inf, math.nan, -math.inf).view(3, 4)
    logits[1] = numbers(-math.inf, 0.0, -0.0, -math.inf)
    for index in (torch.int32, torch.int64):
        tokens, logprobs, best, of_best = tiercel.sample(
            logits, temperature=0.0, top_logprobs=3, indices_dtype=index
        )
        assert tokens.dtype == best.dtype == index and tokens.tolist() == [1, 1, -1]
        assert best.tolist() == [[1, 3, 0], [1, 2, -1], [-1, -1, -1]]
        torch.testing.assert_close(of_best[0], numbers(0.4, 0.3, 0.2).log())
        assert of_best[1].tolist()[2] == -math.inf and of_best[2].isnan().all()
        assert torch.equal(logprobs[:2], of_best[:2, 0])
    # More than there are tokens; the list has nothing of temperature and filters.
    given = {"temperature": 0.3, "top_k": 1, "top_logprobs": 40}
    _, _, best, of_best = tiercel.sample(logits[:1], **given)
    assert best.tolist() == [[1, 3, 0, 2] + [-1] * 36]
    torch.testing.assert_close(of_best[0, :4], numbers(0.4, 0.3, 0.2, 0.1).log())


def test_bad_arguments():
    logits = torch.randn(3, 8)
    for value, error, text in (
        (True, TypeError, "must be an int, got bool"),
        (2.0, TypeError, "must be an int, got float"),
        (-1, ValueError, "must be at least 1, got -1"),
    ):
        with pytest.raises(error, match=f"sample: `top_logprobs` {text}"):
            tiercel.sample(logits, top_logprobs=value)
    with pytest.raises(TypeError, match="`return_logprobs` must be a bool, got int"):
        tiercel.sample(logits, return_logprobs=1)
    with pytest.raises(ValueError, match="`logits` must have at least 1 column, got 0"):
        tiercel.sample(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"`allowed` must have shape \[T, ceil\(V / 32\)\]"):
        tiercel.sample(logits, allowed=torch.zeros(3, 2, dtype=torch.int32))


def test_into_a_graph():
    def step(logits, temperatures, seeds):
        return tiercel.sample(logits, temperature=temperatures, top_p=0.9, seed=seeds)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    logits, seeds = torch.randn(5, 64), torch.arange(5)
    assert torch.equal(compiled(logits, torch.ones(5), seeds), step(logits, torch.ones(5), seeds))
    compiled = torch.compile(
        lambda x: tiercel.sample(x, top_logprobs=4), fullgraph=True, backend="aot_eager"
    )
    due = tiercel.sample(logits, top_logprobs=4)
    assert all(map(torch.equal, compiled(logits), due)) and due[2].shape == (5, 4)
