# SPDX-License-Identifier: Apache-2.0
"""Files as they come from elsewhere: cut short, with bytes or whole values changed."""

import copy
import json
import random

ODD = (
    None,
    True,
    -1,
    0,
    7,
    2**63,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../../up",
    "\x1b[2J\x00\ud800",
    "9" * 5000,
    [],
    [1],
    {},
    {"x": 1},
)


def texts(value, count, seed=0):
    """`count` texts of a JSON value: half with values and keys changed, half with bytes changed."""
    chance = random.Random(seed)
    plain = json.dumps(value)
    yield from ("", "null", "[" * 100_000, '{"a":' * 100_000, "\ufeff" + plain, plain * 2)
    for number in range(count):
        if number % 2:
            yield json.dumps(_changed(value, chance))
        else:
            yield damaged(plain, chance)


def _changed(value, chance):
    """One to three places, each replaced or taken away."""
    value = copy.deepcopy(value)
    for _ in range(chance.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return chance.choice(ODD)
        holder, key = chance.choice(places)
        if chance.random() < 0.25:
            del holder[key]
        else:
            holder[key] = chance.choice(ODD)
    return value


def _places(value):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def damaged(text, chance):
    """Cut short, a piece taken away or doubled, or a few letters changed."""
    at = chance.randrange(len(text))
    end = min(len(text), at + chance.randint(1, 40))
    kind = chance.randrange(4)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[end:]
    if kind == 2:
        return text[:end] + text[at:]
    letters = list(text)
    for _ in range(chance.randint(1, 4)):
        letters[chance.randrange(len(letters))] = chance.choice('0129-e.,:"{}[]\\\n\t x\x00\udc80é')
    return "".join(letters)


def write(path, text):
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    return path
