# SPDX-License-Identifier: Apache-2.0
"""Train a small mixture of experts whose router is tiercel.nn.TopkSoftmax; runs anywhere.

python examples/mixture.py [--steps N]
"""

import argparse
import warnings

import torch
from torch import Tensor, nn

import tiercel


class Mixture(nn.Module):
    """Each token goes through its k experts; gradients reach the router through the weights."""

    def __init__(self, width: int, experts: int, k: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.choose = tiercel.nn.TopkSoftmax(k, renormalize=True, indices_dtype=torch.int64)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(self.router(x))
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            result = result.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    warnings.simplefilter("ignore", tiercel.FallbackWarning)  # ref will do on a machine without
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Mixture(width=32, experts=8, k=2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(512, 32, device=device)
    target = x.roll(1, dims=1) * x.sign()

    for step in range(args.steps + 1):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, args.steps // 4) == 0:
            print(f"step {step:4}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
