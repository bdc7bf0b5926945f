# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4-bit floats times few vectors.

PyTorch has no such product on this GPU: it multiplies what the weights stand for, made bfloat16
beforehand, which they fit exactly. vLLM's is Marlin, with weights and scales put into its own order
beforehand; it has vectors of bfloat16 only, and for w4_linear activations of float8. Its Machete
takes int4, also in an order of its own, as Humming and quack do all formats.
"""

from __future__ import annotations

from typing import Any

from tiercel.ops.gemv.cases import values_of
from tiercel.workbench.bench.launch import Launch, Unsupported
from tiercel.workbench.bench.peers.vllm import operator


def _torch_linear(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    weight = values_of(inputs["weight"], inputs["scale"], torch.bfloat16)
    x = inputs["x"]
    return Launch(run=lambda: (torch.nn.functional.linear(x, weight),))


def _torch_w4(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    from tiercel.ops.gemv.reference import w4_values

    weight = w4_values(inputs["weight"], inputs["scale"], case["format"]).to(torch.bfloat16)
    x = inputs["x"]
    if case["float8"]:
        x = (x.float() * inputs["x_scale"]).to(torch.bfloat16)
    return Launch(run=lambda: (torch.nn.functional.linear(x, weight),))


def _batches(inputs: dict[str, Any]) -> tuple[Any, Any]:
    """The matrices [l, m, k] and vectors [l, 1, k] as bfloat16."""
    import torch

    made = []
    for name in ("a", "b"):
        scale = inputs[f"scale_{name}"].to(inputs["a"].device).permute(2, 0, 1)
        made.append(values_of(inputs[name].permute(2, 0, 1), scale, torch.bfloat16))
    return made[0], made[1]


def _torch_gemv(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    matrices, vectors = _batches(inputs)
    columns = vectors.mT.contiguous()
    return Launch(run=lambda: (torch.bmm(matrices, columns).permute(1, 2, 0),))


# e2m1 among vLLM's scalar types: 2 bits of exponent, 1 of mantissa, signed, finite values only.
E2M1_TYPE = 2 | 1 << 8 | 1 << 16 | 1 << 49
# Four bits of mantissa, unsigned, less 8.
_INT4_TYPE = 4 << 8 | 8 << 17 | 1 << 50
_ORDER = [i + 8 * j for i in range(8) for j in range(8)]
_ORDER_OF_FLOAT8 = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _marlin_scales(scale: Any, kind: str, float8: bool) -> Any:
    """Scales [n, groups] in Marlin's order and format; nvfp4's: e4m3's bits without the sign,
    shifted. With float8 activations, times the power of 2 that its numbers lack in e4m3."""
    import torch

    n = scale.shape[0]
    if float8:
        turned = scale + 6 if kind == "mxfp4" else scale * 512
        turned = turned.t().reshape(-1, len(_ORDER_OF_FLOAT8))[:, _ORDER_OF_FLOAT8]
        turned = turned.reshape(-1, n).contiguous()
        return turned.view(torch.float8_e8m0fnu) if kind == "mxfp4" else turned
    turned = scale.float().half() if kind == "nvfp4" else scale
    turned = turned.t().reshape(-1, len(_ORDER))[:, _ORDER]
    if kind != "int4":
        turned = turned.reshape(-1, 4)[:, [0, 2, 1, 3]]
    turned = turned.reshape(-1, n).contiguous()
    if kind == "mxfp4":
        return turned.view(torch.float8_e8m0fnu)
    if kind == "int4":
        return turned
    bits = (turned * 2.0**7).view(torch.int16) << 1
    return bits.view(torch.float8_e4m3fn)[:, 1::2].contiguous()


class _Marlin:
    """One weight [n, k] prepared for it."""

    def __init__(self, weight: Any, scale: Any, kind: str = "nvfp4", x_scale: Any = None) -> None:
        import torch

        self._x_scale, float8 = x_scale, x_scale is not None

        repack, self._gemm = operator("_C", "gptq_marlin_repack"), operator("_C", "marlin_gemm")
        self._n, self._k = weight.shape[0], 2 * weight.shape[1]
        if self._n % 64 or self._k % 128:
            raise Unsupported("N must be a multiple of 64 and K of 128")
        packed = weight.view(torch.uint8).view(torch.int32).t().contiguous()
        names = [a.name for a in repack.default._schema.arguments]
        sizes = {"size_k": self._k, "size_n": self._n, "num_bits": 4, "is_a_8bit": float8}
        given: dict[str, Any] = {name: sizes[name] for name in names if name in sizes}
        if "perm" in names:
            given["perm"] = torch.empty(0, dtype=torch.int32, device=weight.device)
        self._weight = repack(packed, **given)
        if float8 and kind == "int4":
            prepare = operator("_C", "marlin_int4_fp8_preprocess")
            self._weight = prepare(self._weight, None, False)
        self._scale = _marlin_scales(scale, kind, float8)
        self._type = _INT4_TYPE if kind == "int4" else E2M1_TYPE
        self._workspace = torch.zeros(1024, dtype=torch.int32, device=weight.device)
        # 2^126 makes bfloat16 of e2m1's bits, 2^-7 takes back what the scales got.
        self._global = torch.tensor([2.0**119], device=weight.device) if kind == "nvfp4" else None

    def __call__(self, x: Any, out: Any = None) -> Any:
        values = {
            "a": x,
            "c_or_none": out,
            "b_q_weight": self._weight,
            "b_scales": self._scale,
            "a_scales": self._x_scale,
            "global_scale": self._global,
            "workspace": self._workspace,
            "b_type_id": self._type,
            "size_m": x.shape[0],
            "size_n": self._n,
            "size_k": self._k,
            "use_atomic_add": True,
            "use_fp32_reduce": True,
            "is_zp_float": False,
            "is_k_full": True,
        }
        names = [argument.name for argument in self._gemm.default._schema.arguments]
        return self._gemm(*(values.get(name) for name in names))

    def settle(self, x: Any, weight: Any) -> None:
        """Versions differ in the global scale's dtype: takes the one that gives the product."""
        import torch

        due = x.float() @ weight.float().T
        for dtype in (torch.float32, torch.bfloat16):
            self._global = self._global.to(dtype)
            try:
                got = self(x).float()
            except RuntimeError as error:
                text = str(error)
                continue
            text = "its product is another one"
            if bool(((got - due).abs() <= 0.05 * due.square().mean().sqrt()).all()):
                return
        raise Unsupported(f"marlin_gemm does not take these weights: {text.splitlines()[0]}")


def _vllm_linear(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    x = inputs["x"]
    marlin = _Marlin(inputs["weight"], inputs["scale"])
    marlin.settle(x, values_of(inputs["weight"], inputs["scale"], torch.bfloat16))
    return Launch(run=lambda: (marlin(x),))


def _vllm_w4(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    x, weight, scale = (inputs[name] for name in ("x", "weight", "scale"))
    if case["format"] == "nvfp4":
        weight = weight.view(torch.float4_e2m1fn_x2)
        return _vllm_linear(case, {"x": x, "weight": weight, "scale": scale})
    marlin = _Marlin(weight, scale, case["format"], inputs.get("x_scale"))
    out = torch.empty(case["T"], case["N"], dtype=torch.bfloat16, device=x.device)
    return Launch(run=lambda: (marlin(x, out if case["float8"] else None),))


def _machete_w4(case: Any, inputs: dict[str, Any]) -> Launch:
    import torch

    if case["format"] != "int4" or case["float8"]:
        raise Unsupported("it has int4 with 16-bit activations only")
    prepack, product = operator("_C", "machete_prepack_B"), operator("_C", "machete_mm")
    x, weight, scale = (inputs[name] for name in ("x", "weight", "scale"))
    # [K / 8, N], columns contiguous; scales [K / group, N].
    words = weight.view(torch.int32).t()
    packed = prepack(words, x.dtype, _INT4_TYPE, scale.dtype)
    scales, group = scale.t().contiguous(), case["K"] // scale.shape[1]

    def run() -> tuple[Any]:
        return (product(x, packed, _INT4_TYPE, None, scales, None, group, None, None, None),)

    return Launch(run)


def _quack_w4(case: Any, inputs: dict[str, Any]) -> Launch:
    """Its product of 16-bit activations in the configuration that it chooses."""
    from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

    if case["float8"]:
        raise Unsupported("with float8 activations its whole numbers are -7 to 7, without MXFP4")
    if case["N"] % 128 or case["K"] % 128:
        raise Unsupported("N and K must be multiples of 128")
    x, kind = inputs["x"], case["format"]  # int4's groups are of 128 values
    weight, scale = prepare_w4_weight(inputs["weight"], inputs["scale"], wformat=kind)
    return Launch(run=lambda: (gemm_w4a16(x, weight, scale, wformat=kind),))


# The schemas of its checkpoints.
_HUMMING: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
}


def _humming_w4(case: Any, inputs: dict[str, Any]) -> Launch:
    """A layer with 16-bit activations in the configuration that it chooses."""
    import torch
    from humming.layer import HummingLayer

    kind = case["format"]
    if kind not in _HUMMING or case["float8"]:
        raise Unsupported("this adapter is for MXFP4 and int4 with 16-bit activations")
    x, weight, scale = (inputs[name] for name in ("x", "weight", "scale"))
    tensors = {"weight": weight, "weight_scale": scale}
    if kind == "int4":  # [K / 8, N] and [K / 128, N]
        tensors = {"qweight": weight.view(torch.int32).t(), "scales": scale.t()}
    layer = HummingLayer(
        shape_n=case["N"],
        shape_k=case["K"],
        weight_config=dict(_HUMMING[kind]),
        torch_dtype=torch.bfloat16,
    ).to(x.device)
    layer.load_from_tensors({name: t.contiguous() for name, t in tensors.items()})
    layer.transform()
    return Launch(run=lambda: (layer(x),))


def _vllm_gemv(case: Any, inputs: dict[str, Any]) -> Launch:

    matrices, vectors = _batches(inputs)
    marlins = []
    for i in range(case["L"]):
        scale = inputs["scale_a"][..., i].to(vectors.device)
        marlins.append(_Marlin(inputs["a"][..., i].contiguous(), scale))
        marlins[-1].settle(vectors[i], matrices[i])

    out = vectors.new_empty(case["L"], 1, case["M"])

    def run() -> tuple[Any]:
        for i, marlin in enumerate(marlins):
            marlin(vectors[i], out[i])
        return (out.permute(2, 1, 0),)

    return Launch(run)


ADAPTERS = {
    "torch": {"nvfp4_gemv": _torch_gemv, "nvfp4_linear": _torch_linear, "w4_linear": _torch_w4},
    "vllm": {
        "nvfp4_gemv": _vllm_gemv,
        "nvfp4_linear": _vllm_linear,
        "w4_linear": _vllm_w4,
    },
    "vllm.machete": {"w4_linear": _machete_w4},
    "humming": {"w4_linear": _humming_w4},
    "quack": {"w4_linear": _quack_w4},
}
