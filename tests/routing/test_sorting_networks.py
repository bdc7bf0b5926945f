# SPDX-License-Identifier: Apache-2.0
"""The sorting networks of kernels/routing/sorting.cuh sort: all inputs, by the 0-1 principle."""

import itertools
import pathlib
import re

import pytest

SOURCE = (pathlib.Path(__file__).parents[2] / "kernels/routing/sorting.cuh").read_text()
NETWORKS = {
    int(keys): [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+), (\d+)\}", body)]
    for keys, body in re.findall(
        r"Key \(&keys\)\[(\d+)\]\) \{\s+constexpr unsigned char kNetwork\[\d+\]\[2\] = \{(.*?)\};",
        SOURCE,
        re.DOTALL,
    )
}


def test_all_networks_are_found() -> None:
    assert {keys: len(pairs) for keys, pairs in NETWORKS.items()} == {4: 5, 8: 19, 16: 60}


@pytest.mark.parametrize("keys", sorted(NETWORKS))
def test_network_sorts_descending(keys: int) -> None:
    # One integer a wire: bit i is what the wire carries for input i, so a pair is an or and an and.
    inputs = 1 << keys
    wires = [sum(1 << i for i in range(inputs) if i >> wire & 1) for wire in range(keys)]
    for high, low in NETWORKS[keys]:
        wires[high], wires[low] = wires[high] | wires[low], wires[high] & wires[low]
    for above, below in itertools.pairwise(wires):
        assert below & ~above == 0
