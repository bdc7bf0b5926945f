# SPDX-License-Identifier: Apache-2.0
"""Type aliases for backends: a tensor and, as its annotation, what the contract says of it.

The contracts give them. Type checkers and editors read ``types.pyi``, which has the same source.
"""

from tiercel.plugins.type_names import source

exec(compile(source(), "<tiercel.plugins.types>", "exec"))
