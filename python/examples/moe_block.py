"""Replaces the Mixture-of-Experts block of a small language model by Cubist's kernels, and trains both.

    python python/examples/moe_block.py

The model predicts the next character of a text: embedding, causal attention, and a block of experts. `PlainMoe` writes
the block as PyTorch does without fused kernels, `FusedMoe` with cubist.torch; everything else is the same, weights
included, and so are the losses.
"""

import time

import torch
from torch import nn
from torch.nn import functional as F

import cubist.torch

TEXT = (
    "A kernel is written once, as plain sequential code that issues tile instructions on a core. "
    "Two executors run that same code: the host computes, the model records the instructions and predicts. "
) * 8
HIDDEN, HEADS, EXPERTS, TOP_K, WIDTH, LENGTH = 64, 4, 8, 2, 96, 64


class Moe(nn.Module):
    """Weights and router, which both blocks share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.router = nn.Parameter(torch.randn(HIDDEN, EXPERTS) * HIDDEN**-0.5)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDTH) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)

    def routes(self, x):
        scores, ids = torch.softmax(x @ self.router, dim=-1).topk(TOP_K, dim=-1)
        return scores / scores.sum(-1, keepdim=True), ids


class PlainMoe(Moe):
    def forward(self, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm
        weights, ids = self.routes(x)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            tokens, route = torch.where(ids == expert)
            gate, up = (x[tokens] @ self.gate_up[expert]).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ self.down[expert]
            out = out.index_add(0, tokens, y * weights[tokens, route, None])
        return out


class FusedMoe(Moe):
    def forward(self, x):
        x = cubist.torch.rms_norm(x, self.norm)
        weights, ids = self.routes(x)
        rows = cubist.torch.token_permute(x, ids.int(), EXPERTS)
        both = cubist.torch.grouped_matmul(rows.permuted, rows.expert_counts, self.gate_up)
        act = cubist.torch.swiglu(both[:, :WIDTH], both[:, WIDTH:])
        down = cubist.torch.grouped_matmul(act, rows.expert_counts, self.down)
        return cubist.torch.token_unpermute(down, rows.sorted_indices, weights)


class Model(nn.Module):
    def __init__(self, moe, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe, self.head = moe(), nn.Linear(HIDDEN, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if isinstance(self.moe, FusedMoe):
            attended = cubist.torch.flash_attention(q, k, v, causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, HIDDEN))
        return self.head(x + self.moe(x.view(-1, HIDDEN)).view(x.shape))


def train(moe, steps=30):
    """The losses of the first steps."""
    torch.manual_seed(1)
    letters = sorted(set(TEXT))
    text = torch.tensor([letters.index(c) for c in TEXT])
    model = Model(moe, len(letters))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        begin = torch.randint(len(text) - LENGTH - 1, (8,))
        batch = torch.stack([text[b : b + LENGTH + 1] for b in begin])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    results = {}
    for moe in (PlainMoe, FusedMoe):
        start = time.perf_counter()
        results[moe.__name__] = train(moe)
        print(f"{moe.__name__}: {time.perf_counter() - start:.2f} s")
    print(f"{'step':>4} {'PlainMoe':>9} {'FusedMoe':>9}")
    for step, losses in enumerate(zip(*results.values()), 1):
        if step <= 3 or step % 10 == 0:
            print(f"{step:4} {losses[0]:9.5f} {losses[1]:9.5f}")
