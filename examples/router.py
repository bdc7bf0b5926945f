# SPDX-License-Identifier: Apache-2.0
"""Route tokens to experts with tiercel.topk_softmax, on whatever machine this runs on.

python examples/router.py [--tokens T] [--experts E] [--k K]
"""

import argparse
import warnings

import torch

import tiercel


def route(router: torch.nn.Linear, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, ...]:
    """Returns the weights and experts of each token, as in most mixtures of experts."""
    return tiercel.topk_softmax(router(tokens), k, renormalize=True)


def compare(scores: torch.Tensor, k: int) -> None:
    """Runs every backend that can run here and prints how their results differ."""
    reference = tiercel.topk_softmax(scores, k, renormalize=True, backend="ref")
    for backend in ("sm90", "ref"):
        try:
            weights, experts = tiercel.topk_softmax(scores, k, renormalize=True, backend=backend)
        except RuntimeError as error:
            print(f"{backend:>6}: not here: {error}")
            continue
        same = torch.equal(experts, reference[1])
        error = (weights - reference[0]).abs().max().item()
        print(f"{backend:>6}: same experts as ref: {same}, largest weight difference {error:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    router = torch.nn.Linear(args.hidden, args.experts, bias=False, device=device)
    tokens = torch.randn(args.tokens, args.hidden, device=device)

    with torch.no_grad():
        scores = router(tokens)
        print(tiercel.explain(tiercel.topk_softmax, scores, args.k, renormalize=True))
        with warnings.catch_warnings():  # explain has said it already
            warnings.simplefilter("ignore", tiercel.FallbackWarning)
            weights, experts = route(router, tokens, args.k)
        print(f"token 0 goes to experts {experts[0].tolist()}")
        print(f"with weights {[round(weight, 3) for weight in weights[0].tolist()]}")
        load = torch.bincount(experts.flatten(), minlength=args.experts)
        print(f"tokens per expert: {load.min().item()} to {load.max().item()}")
        compare(scores, args.k)


if __name__ == "__main__":
    main()
