"""Transformers of the evaluation that no library of ours has, in torch, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017), written out; `bias` is added to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))

    def _split(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, heads, length, width / heads)."""
        batch, length, width = x.shape
        return x.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def attend(self, query: Tensor, scores: Tensor, x: Tensor) -> Tensor:
        """The values of `x`, weighted by the scores (batch, heads, length, length) of `query`."""
        mixed = torch.softmax(scores * query.shape[-1] ** -0.5, dim=-1) @ self._split(self.value(x))
        return self.project(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query = self._split(self.query(x))
        return self.attend(query, query @ self._split(self.key(x)).transpose(2, 3) + bias, x)


class RelativeAttention(Attention):
    """Self-attention that tells places apart by how far they are from each other (Dai et al. 2019, section 3.3), over
    no more than `before` places back and `after` ahead."""

    waves: Tensor
    mask: Tensor

    def __init__(self, width: int, heads: int, length: int, before: int, after: int) -> None:
        super().__init__(width, heads)
        self.places = nn.Linear(width, width, bias=False)
        self.content_bias, self.place_bias = (nn.Parameter(torch.zeros(heads, 1, width // heads)) for _ in range(2))
        self.register_buffer("waves", sinusoids(2 * length - 1, width, length - 1))
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        self.register_buffer("mask", torch.where((distance < -before) | (distance > after), -1e9, 0.0))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        query = self._split(self.query(x))
        content = (query + self.content_bias) @ self._split(self.key(x)).transpose(2, 3)
        far = (query + self.place_bias) @ self._split(self.places(self.waves)[None]).transpose(2, 3)
        return self.attend(query, content + by_place(far) + self.mask, x)


def by_place(far: Tensor) -> Tensor:
    """Scores by distance, (batch, heads, n, 2n - 1), from n - 1 back to n - 1 ahead, as scores by place (batch, heads,
    n, n), n > 1: the place j of row i is j - i away."""
    batch, heads, length, _ = far.shape
    # one after another, each row begins two numbers earlier in the next one's stead: a row is 2n - 2 numbers long
    flat = far.reshape(batch, heads, -1)[:, :, length - 1 : length - 1 + length * (2 * length - 2)]
    return flat.reshape(batch, heads, length, 2 * length - 2)[..., :length]


def sinusoids(length: int, width: int, zero: int = 0) -> Tensor:
    """The waves of places (length, width), `zero` the place that is none away (Vaswani et al. 2017, section 3.5)."""
    place = (torch.arange(length) - zero)[:, None]
    angle = place / 10000.0 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


class GatedLinear(nn.Module):
    """GEGLU feed-forward (Shazeer 2020): W (V x * gelu(U x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x) * functional.gelu(self.gate(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed(norm(x)): a transformer layer with its norms first."""

    def __init__(self, width: int, attention: nn.Module, feed: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed = attention, feed
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norms[0](x), bias)
        return x + self.feed(self.norms[1](x))


class Dalle(nn.Module):
    """The decoder of DALL-E (Ramesh et al. 2021), small: text tokens and image tokens in one sequence, each attending
    to those before it, logits of the next token. Image tokens have places in rows and columns."""

    row: Tensor
    column: Tensor
    mask: Tensor

    def __init__(self, length: int, width: int = 512, layers: int = 8, heads: int = 8, text: int = 64) -> None:
        super().__init__()
        text = min(text, length - 1)  # some of the image is always there
        side = max(1, round((length - text) ** 0.5))
        self.text_embedding, self.image_embedding = nn.Embedding(10000, width), nn.Embedding(8192, width)
        self.text_places = nn.Parameter(torch.zeros(1, text, width))
        self.rows, self.columns = (nn.Parameter(torch.zeros(side + 1, width)) for _ in range(2))
        place = torch.arange(length - text)
        self.register_buffer("row", place // side % (side + 1))
        self.register_buffer("column", place % side)
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1))
        self.blocks = nn.ModuleList(
            Block(width, Attention(width, heads), GatedLinear(width, 4 * width)) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8192)
        self.text = text

    def forward(self, tokens: Tensor) -> Tensor:
        text = self.text_embedding(tokens[:, : self.text]) + self.text_places
        image = self.image_embedding(tokens[:, self.text :]) + self.rows[self.row] + self.columns[self.column]
        x = torch.cat([text, image], dim=1)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class TransducerEncoder(nn.Module):
    """The audio encoder of the Transformer-Transducer (Zhang et al. 2020, table 1): frames of stacked log-mel features
    in, layers with relative places and limited context, encodings out."""

    def __init__(
        self, length: int, width: int = 512, layers: int = 18, heads: int = 8, before: int = 10, after: int = 2
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        feeds = [nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
                 for _ in range(layers)]  # fmt: skip
        self.blocks = nn.ModuleList(
            Block(width, RelativeAttention(width, heads, length, before, after), feed) for feed in feeds
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.enter(frames)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> nn.Module:
    """Random weights larger than libraries', so that attention is not uniform and biases and scales matter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            spread = parameter[0].numel() ** -0.5 if "embedding" not in name else 0.5
            parameter.normal_(0, spread, generator=generator)
        elif name.endswith("weight"):  # the scale of a layer normalisation
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 0.1, generator=generator)
    return model.eval()
