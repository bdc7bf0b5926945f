# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode: a row's bits are the same in any company, for every operator."""

import pytest
import torch
from support import contract_calls as calls
from support.batch_sequences import CASES

import tiercel

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

SIZES = (1, 2, 5, 16, 17, 64, 100, 129, 300, 600, 1300, 2500)


def bits(tensor):
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])


def companies(count, row):
    """Rows of a call, and where in it the fixed one is."""
    generator = torch.Generator().manual_seed(row)
    for size in (*(s for s in SIZES if s < count), count):
        others = torch.randperm(count, generator=generator)
        others = others[others != row][: size - 1]
        at = int(torch.randint(size, (), generator=generator))
        yield torch.cat([others[:at], torch.tensor([row]), others[at:]]), at


def padded(a, b):
    """Results of sequences are as long as the call's longest; zeros stand behind the others."""
    if a.shape == b.shape:
        return a, b
    if a.shape[0] < b.shape[0]:
        b, a = padded(b, a)
        return a, b
    more = a.shape[0] - b.shape[0]
    return a, torch.cat([b, b.new_zeros(more, *b.shape[1:])])


def compare(alone, at, together, other, rows):
    """Row `at` of results with row `other` of those of so many rows."""
    for place, (one, many) in enumerate(zip(alone, together, strict=True)):
        expected, got = padded(bits(one)[at], bits(many)[other])
        wrong = int((expected != got).sum())
        assert wrong == 0, f"result {place}, {rows} rows: {wrong} of {got.numel()} differ"


def check(case, row, count):
    alone = case.run(torch.tensor([row], device="cuda"))
    for rows, at in companies(count, row):
        compare(alone, 0, case.run(rows.cuda()), at, len(rows))


@pytest.mark.parametrize("name", CASES)
def test_a_rows_bits_do_not_depend_on_the_batch(name):
    make = CASES[name][1]
    with tiercel.batch_invariant():
        case = make("cuda")
        for row in (case.count // 3, case.count - 1):
            check(case, row, case.count)


@pytest.mark.parametrize("name", CASES)
def test_bits_of_many_rows(name):
    """Another order of a row's sum often has the same bits: of 64 rows, some would differ."""
    with tiercel.batch_invariant():
        case = CASES[name][1]("cuda")
        few = torch.arange(min(64, case.count), device="cuda")
        some, together = case.run(few), case.run(torch.arange(case.count, device="cuda"))
        for row in few.tolist():
            compare(some, row, together, row, case.count)


def test_every_operator_has_a_case():
    assert {op for op, _ in CASES.values()} == set(calls.OPS)
