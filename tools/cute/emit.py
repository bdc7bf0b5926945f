# SPDX-License-Identifier: Apache-2.0
"""Each function's part of the C++ source that embeds a family's cubins, and of their manifest."""

import hashlib

from declaration import L2_PROMOTIONS, SWIZZLES, Launch, Pointer, TensorMap

# A string literal compiles far faster than a list of numbers; octal escapes end after three digits.
_ESCAPES = [f"\\{byte:03o}" for byte in range(256)]
_LINE = 24


def kernel_name(function, index: int) -> str:
    return function.name if len(function.launches) == 1 else f"{function.name}.{index}"


def _literal(data: bytes) -> str:
    lines = ("".join(_ESCAPES[b] for b in data[i : i + _LINE]) for i in range(0, len(data), _LINE))
    return "\n".join(f'    "{line}"' for line in lines)


def _maps(launch: Launch) -> str:
    specs = []
    for parameter in launch.parameters:
        if isinstance(parameter, TensorMap):
            box = ", ".join(str(side) for side in parameter.box)
            swizzle = f"CUtensorMapSwizzle({SWIZZLES.index(parameter.swizzle)})"
            promotion = f"CUtensorMapL2promotion({L2_PROMOTIONS.index(parameter.l2_promotion)})"
            specs.append(f"{{{len(parameter.box)}, {{{box}}}, {swizzle}, {promotion}}}")
    return "{" + ", ".join(specs) + "}"


def _member(parameter) -> str:
    """A parameter's member of the family's struct of arguments."""
    return f"{parameter.tensor}_map" if isinstance(parameter, TensorMap) else parameter.name


def pieces(compiled, arguments: str = "", first: int = 0, step: int = 1) -> list[dict]:
    """Each function's part of the source and of the manifest. They are the family's functions
    `first`, `first + step` and so on. With a struct of `arguments`, each parameter is bound to the
    member of its name."""
    found = []
    for i, item in enumerate(compiled):
        i = first + i * step
        layouts, rows, checks = [], [], []
        by_symbol = {kernel.symbol: kernel for kernel in item.kernels}
        for j, launch in enumerate(item.function.launches):
            symbol = item.symbols[j]
            parameters = by_symbol[symbol].parameters
            values = ", ".join(f"{{{offset}, {size}}}" for offset, size in parameters)
            layouts.append(
                f"const CubinParameter kParameters{i}_{j}[] = {{{values}}};\n"
                f'const CubinSymbol kSymbol{i}_{j} = {{&kCubin{i}, "{symbol}", '
                f"kParameters{i}_{j}, {len(parameters)}}};\n"
            )
            members = ""
            if arguments:
                names = [_member(parameter) for parameter in launch.parameters]
                offsets = ", ".join(f"offsetof({arguments}, {name})" for name in names)
                layouts.append(f"const uint16_t kMembers{i}_{j}[] = {{{offsets}}};\n")
                members = f", kMembers{i}_{j}, {len(names)}"
                checks += [
                    f"static_assert(sizeof({arguments}::{name}) == {size});\n"
                    for name, (_, size) in zip(names, parameters, strict=True)
                ]
                checks.append(f"static_assert({len(names)} <= kCubinKernelMaxParameters);\n")
            block = launch.block[0] * launch.block[1] * launch.block[2]
            name, dependent = kernel_name(item.function, j), str(launch.dependent).lower()
            rows.append(
                f"    {{{{{', '.join(item.function.attributes)}}}, {_maps(launch)}, {block}, "
                f'{launch.smem}, {dependent}, Kernel("{name}", &kSymbol{i}_{j}, {launch.smem})'
                f"{members}}},\n"
            )
        image = (
            f"alignas(64) const char kImage{i}[] =\n{_literal(item.image)};\n"
            f"const Cubin kCubin{i}(kImage{i});\n"
        )
        found.append(
            {
                "index": i,
                "image": image,
                "layouts": layouts,
                "rows": rows,
                "checks": checks,
                "records": _records(item),
            }
        )
    return found


def _parameter_record(parameter, layout: tuple[int, int]) -> dict:
    record = {"offset": layout[0], "size": layout[1]}
    if isinstance(parameter, TensorMap):
        return record | {
            "kind": "tensor map",
            "tensor": parameter.tensor,
            "shape": list(parameter.shape),
            "box": list(parameter.box),
            "swizzle": parameter.swizzle,
            "l2_promotion": parameter.l2_promotion,
            "alignment": 16,
        }
    kind = "pointer" if isinstance(parameter, Pointer) else "int32"
    record |= {"kind": kind, "name": parameter.name}
    return record | ({"alignment": parameter.align} if kind == "pointer" else {})


def _records(item) -> list[dict]:
    """A function's part of the manifest: what was declared and checked, by kernel."""
    records = []
    by_symbol = {kernel.symbol: kernel for kernel in item.kernels}
    for j, launch in enumerate(item.function.launches):
        layout = by_symbol[item.symbols[j]].parameters
        records.append(
            {
                "name": kernel_name(item.function, j),
                "symbol": item.symbols[j],
                "cubin": f"{item.function.name}.cubin",
                "sha256": hashlib.sha256(item.image).hexdigest(),
                "bytes": len(item.image),
                "attributes": list(item.function.attributes),
                "dtypes": {
                    argument.name: argument.dtype.__name__
                    for argument in item.function.leaves
                    if isinstance(argument, Pointer)
                },
                "grid": list(launch.grid),
                "block": list(launch.block),
                "cluster": list(launch.cluster),
                "dynamic_smem": launch.smem,
                "dependent": launch.dependent,
                "parameters": [
                    _parameter_record(parameter, place)
                    for parameter, place in zip(launch.parameters, layout, strict=True)
                ],
            }
        )
    return records
