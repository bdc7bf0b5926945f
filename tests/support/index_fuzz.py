# SPDX-License-Identifier: Apache-2.0
"""Index tensors that hold anything, for kernels on the emulator.

A test draws cases by number, so that one that failed can be tried again. TIERCEL_FUZZ_CASES says
how many there are of each operator; by default a quick sample.
"""

import contextlib
import os
import random

import torch
from support.emulator import options, sm90

CASES = int(os.environ.get("TIERCEL_FUZZ_CASES", "12"))
_MARGIN = 4096  # bytes on both sides of a tensor that belong to somebody else
_FILL = 0xA5
_margins = []


@contextlib.contextmanager
def margins_kept():
    """No kernel in the block writes beside the tensors that `embedded` has made."""
    made = list(_margins)
    _margins.clear()
    yield
    for buffer, size in made:
        assert (buffer[:_MARGIN] == _FILL).all(), "a write before a tensor"
        assert (buffer[_MARGIN + size :] == _FILL).all(), "a write behind a tensor"


def embedded(tensor):
    """A copy in a larger buffer; the emulator knows where the copy begins and ends."""
    size = tensor.numel() * tensor.element_size()
    buffer = torch.full((size + 2 * _MARGIN,), _FILL, dtype=torch.uint8)
    _margins.append((buffer, size))
    inside = buffer[_MARGIN : _MARGIN + size].view(tensor.dtype).view(tensor.shape)
    inside.copy_(tensor)
    return inside


def run(name, *args, multiprocessors=4):
    """An operator's kernels on tensors with margins; the result, and the arguments that it had."""
    given = [embedded(x) if isinstance(x, torch.Tensor) else x for x in args]
    with margins_kept(), options(multiprocessors=multiprocessors):
        result = sm90(name)(*given)
    return result, given


def reference(name):
    from tiercel.core.dispatch import variants as families

    found = [op for family in families.values() for op in family if op.name == name]
    return found[0].backends["ref"].run


class Draw:
    """What a case is made of."""

    def __init__(self, case):
        self.random = random.Random(case)
        self.generator = torch.Generator().manual_seed(case)

    def of(self, *values):
        return self.random.choice(values)

    def normal(self, *shape, dtype=torch.bfloat16, scale=1.0):
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator)

    def strays(self, right, count, wide):
        """`right` as int32 or, if `wide`, int64, where some, many or all numbers are others: next
        to 0 and to `count`, what programs use for none, the largest, what int32 cuts off."""
        bits = 64 if wide else 32
        last = 2 ** (bits - 1) - 1
        others = [-1, -2, count, count + 1, -count, 2**29, -(2**29), 2**31 - 1, -(2**31), 10**6]
        if wide:
            inside = self.random.randrange(max(count, 1))
            others += [2**32 + inside, -(2**32) + inside, 2**31, 2**33 + count, last, -last - 1]
        share = self.of(0.1, 0.5, 1.0)
        numbers = right.flatten().tolist()
        for i in range(len(numbers)):
            if self.random.random() < share:
                anything = self.random.randint(-last - 1, last)
                numbers[i] = anything if self.random.random() < 0.4 else self.of(*others)
        dtype = torch.int64 if wide else torch.int32
        return torch.tensor(numbers, dtype=dtype).view(right.shape)
