# SPDX-License-Identifier: Apache-2.0
"""The declarations say what tests/<family>/declarations.txt says."""

import pytest
from support import declarations

FAMILIES = declarations.by_family()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_is_meant(family):
    text = (declarations.TESTS / family / "declarations.txt").read_text()
    assert declarations.render(FAMILIES[family]) == text, declarations.__doc__
