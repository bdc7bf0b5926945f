# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the experts' MLPs."""

from __future__ import annotations

from typing import Any

from tiercel.ops.moe import spec
from tiercel.plugins.contract import Case, Contract


def _case(
    names: str, sizes: tuple[int, ...], dtype: str, values: str = "random", **more: Any
) -> Case:
    return Case(dict(zip(names.split(), sizes, strict=True)), dtype, more, values)


def _fused(*sizes: int, dtype: str = "bfloat16", values: str = "random", act: str = "silu") -> Case:
    return _case("T E k H I", sizes, dtype, values, activation=act)


def _up(*sizes: int, dtype: str = "bfloat16", values: str = "random", act: str = "silu") -> Case:
    return _case("T E top_k H I block_size", sizes, dtype, values, activation=act)


def _down(*sizes: int, dtype: str = "bfloat16", values: str = "random") -> Case:
    return _case("elements E H I block_size", sizes, dtype, values)


def _values(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    sizes = case.sizes
    experts, hidden, inner = (sizes[name] for name in "EHI")
    # One element a token where only the routing matters.
    tokens, k = sizes.get("T", sizes.get("elements", 0)), sizes.get("k", sizes.get("top_k", 1))
    # On the CPU and then moved: the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def random(*shape: int, scale: float = 1.0) -> Any:
        drawn = torch.randn(*shape, generator=generator) * scale
        return drawn.to(device=device, dtype=dtype)

    x = random(tokens, inner if "elements" in sizes else hidden)
    if case.values == "strided":
        x = torch.cat([x, -x], dim=1)[:, : x.shape[1]]
    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices.int()
    return {
        "x": x,
        "w_up": random(experts, 2 * inner, hidden, scale=hidden**-0.5),
        "w_down": random(experts, hidden, inner, scale=inner**-0.5),
        "topk_weights": torch.rand(tokens, k, generator=generator).to(device),
        "topk_ids": ids.to(device),
    }


def _make(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    expert_map = None
    if case.values == "elsewhere":  # every second expert is
        experts = torch.arange(2 * case.sizes["E"], dtype=torch.int32)
        expert_map = torch.where(experts % 2 == 0, experts // 2, -1).int().to(device)
    values = _values(case, device, seed)
    if expert_map is not None:
        values["topk_ids"] = values["topk_ids"] * 2 + values["topk_ids"] % 2
    scales = {"w_up_scale": None, "w_down_scale": None}
    return {**values, **case.options, "expert_map": expert_map, **scales}


def _routing(ids: Any, case: Case) -> dict[str, Any]:
    from tiercel.ops.routing.reference import moe_align_block_size

    names = ("sorted_token_ids", "expert_ids", "num_tokens_post_padded")
    found = moe_align_block_size(ids, case.sizes["block_size"], case.sizes["E"])
    return dict(zip(names, found, strict=True))


def _make_up(case: Case, device: str, seed: int) -> dict[str, Any]:
    values = _values(case, device, seed)
    routing = _routing(values["topk_ids"], case)
    sizes = {"top_k": case.sizes["top_k"], "block_size": case.sizes["block_size"]}
    return {"x": values["x"], "w_up": values["w_up"], **routing, **sizes, **case.options}


def _make_down(case: Case, device: str, seed: int) -> dict[str, Any]:
    values = _values(case, device, seed)
    return {
        "x": values["x"],
        "w_down": values["w_down"],
        "topk_weights": values["topk_weights"].flatten(),
        **_routing(values["topk_ids"], case),
        "block_size": case.sizes["block_size"],
    }


FUSED_MOE = Contract.of(
    "moe",
    spec.FUSED_MOE,
    cases=(
        _fused(1, 8, 2, 320, 320),
        _fused(17, 6, 3, 384, 328, dtype="float16", act="gelu"),
        _fused(40, 4, 2, 336, 320, act="relu"),
        _fused(5, 4, 2, 320, 352, act="gelu_residual"),
        _fused(9, 4, 2, 320, 320, values="elsewhere"),
        _fused(9, 4, 2, 320, 320, values="strided"),
        _fused(0, 4, 2, 320, 320),
    ),
    timing={"cpu": _fused(8, 8, 2, 320, 320), "cuda": _fused(16, 64, 8, 2048, 1024)},
    make=_make,
)

MOE_UP = Contract.of(
    "moe",
    spec.MOE_UP.without("x_scale", "w_up_scale"),
    cases=(
        _up(1, 8, 2, 320, 320, 64),
        _up(17, 6, 3, 384, 328, 64, dtype="float16", act="gelu"),
        _up(40, 4, 2, 336, 320, 128, act="relu"),
        _up(9, 4, 2, 320, 320, 64, values="strided"),
        _up(0, 4, 2, 320, 320, 64),
    ),
    timing={"cpu": _up(8, 8, 2, 320, 320, 64), "cuda": _up(16, 64, 8, 2048, 1024, 64)},
    make=_make_up,
)

MOE_DOWN = Contract.of(
    "moe",
    spec.MOE_DOWN.without("x_scale", "w_down_scale"),
    cases=(
        _down(1, 8, 320, 320, 64),
        _down(51, 6, 384, 328, 64, dtype="float16"),
        _down(80, 4, 336, 320, 128),
        _down(9, 4, 320, 320, 64, values="strided"),
        _down(0, 4, 320, 320, 64),
    ),
    timing={"cpu": _down(16, 8, 320, 320, 64), "cuda": _down(128, 64, 2048, 1024, 64)},
    make=_make_down,
)


def _groups(*sizes: int, dtype: str = "bfloat16", values: str = "random") -> Case:
    return _case("M E N K", sizes, dtype, values)


def _make_groups(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, groups, columns, k = (case.sizes[name] for name in ("M", "E", "N", "K"))
    dtype = getattr(torch, case.dtype)
    x = torch.randn(rows, k, generator=generator)
    if case.values == "strided":
        x = torch.cat([x, -x], dim=1)
    w = torch.randn(groups, columns, k, generator=generator) * k**-0.5
    ends = torch.randint(0, rows + 1, (groups + 1,), generator=generator).sort().values
    return {
        "x": x.to(device=device, dtype=dtype)[:, :k],
        "w": w.to(device=device, dtype=dtype),
        "offsets": ends.int().to(device),
    }


GROUPED_GEMM = Contract.of(
    "moe",
    spec.GROUPED_GEMM,
    cases=(
        _groups(300, 4, 136, 200),
        _groups(40, 8, 64, 72, dtype="float16"),
        _groups(90, 3, 64, 128, values="strided"),
        _groups(0, 4, 64, 64),
    ),
    timing={"cpu": _groups(64, 4, 128, 128), "cuda": _groups(8192, 64, 2048, 2048)},
    make=_make_groups,
)


_W4_SPEC = spec.W4_MOE.without("x_scale")


def _w4(*sizes: int, format: str = "mxfp4", act: str = "silu", values: str = "random") -> Case:  # noqa: A002
    dtype = "float16" if values == "float16" else "bfloat16"
    return _case("T E k H I", sizes, dtype, values, format=format, activation=act)


def _make_w4(case: Case, device: str, seed: int) -> dict[str, Any]:
    import torch

    sizes, kind = case.sizes, case.options["format"]
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    experts, hidden, inner = (sizes[name] for name in "EHI")
    gpt_oss = case.values == "gpt_oss"

    def uniform(*shape: int) -> Any:
        return torch.rand(*shape, generator=generator)

    def half(name: str, rows: int, columns: int) -> dict[str, Any]:
        group = {"nvfp4": 16, "mxfp4": 32, "int4": 64}[kind]
        shape = (experts, rows, columns // group)
        codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator)
        zeros = None
        if kind == "mxfp4":
            scale = torch.randint(122, 126, shape, generator=generator).to(torch.uint8)
        elif kind == "nvfp4":
            scale = (uniform(*shape) / 4 + 0.05).to(torch.float8_e4m3fn)
        else:
            scale = (uniform(*shape) / 8 + 0.02).to(dtype)
            if case.values == "zero points":
                zeros = torch.randint(4, 12, shape, generator=generator).to(dtype).to(device)
        bias = torch.randn(experts, rows, generator=generator).to(dtype).to(device)
        factors = torch.full((experts,), columns**-0.5, device=device)
        return {
            f"w_{name}": codes.to(torch.uint8).to(device),
            f"w_{name}_scale": scale.to(device),
            f"{name}_bias": bias if gpt_oss else None,
            f"{name}_zero_point": zeros,
            f"{name}_global_scale": factors,
        }

    expert_map = None
    everywhere = experts
    if case.values == "elsewhere":
        everywhere = 2 * experts
        places = torch.arange(everywhere, dtype=torch.int32)
        expert_map = torch.where(places % 2 == 0, places // 2, -1).int().to(device)
    x = torch.randn(sizes["T"], 2 * hidden, generator=generator).to(dtype)
    ids = uniform(sizes["T"], everywhere).topk(sizes["k"]).indices.int()
    rows = inner if case.options["activation"] == "relu_squared" else 2 * inner
    x = x[:, :hidden] if case.values == "strided" else x[:, :hidden].contiguous()
    given = {
        "x": x.to(device),
        **half("up", rows, hidden),
        **half("down", hidden, inner),
        "topk_weights": (uniform(sizes["T"], sizes["k"]) / sizes["k"]).to(device),
        "topk_ids": ids.to(device),
        **case.options,
        "alpha": 1.702 if gpt_oss else 1.0,
        "limit": 7.0 if gpt_oss else 0.0,
        "interleaved": gpt_oss,
        "expert_map": expert_map,
    }
    return {name: given[name] for name in _W4_SPEC.names}


W4_MOE = Contract.of(
    "moe",
    _W4_SPEC,
    cases=(
        _w4(1, 4, 2, 128, 64),
        _w4(5, 4, 2, 192, 128, act="silu_residual", values="gpt_oss"),
        _w4(20, 3, 2, 128, 192, format="nvfp4", act="gelu"),
        _w4(130, 2, 1, 64, 128, format="int4", act="relu", values="zero points"),
        _w4(9, 4, 2, 128, 64, format="nvfp4", act="relu_squared"),
        _w4(9, 2, 2, 128, 64, values="elsewhere"),
        _w4(9, 4, 2, 128, 64, values="strided"),
        _w4(9, 4, 2, 128, 128, format="int4", values="float16"),
        _w4(0, 4, 2, 128, 64),
    ),
    timing={"cpu": _w4(4, 4, 2, 128, 128), "cuda": _w4(16, 32, 4, 2880, 2880)},
    make=_make_w4,
    derive=lambda sizes, values: {"I": 2 * values["w_down"].shape[-1]},
)

CONTRACTS = (FUSED_MOE, GROUPED_GEMM, MOE_DOWN, MOE_UP, W4_MOE)

# Names in tiercel.plugins.types.
ALIASES = {
    "TokenFeatures": "fused_moe.x",
    "UpWeights": "fused_moe.w_up",
    "DownWeights": "fused_moe.w_down",
    "TokenWeights": "fused_moe.topk_weights",
    "TokenExperts": "fused_moe.topk_ids",
    "LocalExperts": "fused_moe.expert_map",
    "UpScale": "fused_moe.w_up_scale",
    "DownScale": "fused_moe.w_down_scale",
    "MixedTokens": "fused_moe.out",
    "InnerFeatures": "moe_down.x",
    "ElementWeights": "moe_down.topk_weights",
    "InnerResult": "moe_up.out",
    "OuterResult": "moe_down.out",
}
