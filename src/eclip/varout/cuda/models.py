"""A detection model and a mixture-of-experts block that are captured end to end.

Both are small, with random weights, and exist to show and to test: each has ``plain``, the same
computation with PyTorch's own operators, which wait for the device.
"""

from __future__ import annotations

import torch
from torch import nn

from eclip import varout
from eclip.varout.cuda.ragged import OutputWindow


class Detector(nn.Module):
    """Convolutions propose places; a head looks at these places only; then NMS."""

    def __init__(
        self, channels: int = 32, threshold: float = 0.0, capacity: int = 512, kept: int = 128
    ) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.candidate = nn.Conv2d(channels, 1, 1)
        self.head = nn.Sequential(nn.Linear(channels, 128), nn.ReLU(), nn.Linear(128, 5))
        self.threshold, self.capacity, self.kept = threshold, capacity, kept

    def _features(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        maps = self.trunk(image)
        likely = self.candidate(maps).flatten() > self.threshold
        height, width = maps.shape[-2:]
        rows = torch.arange(height, device=image.device).repeat_interleave(width)
        columns = torch.arange(width, device=image.device).repeat(height)
        centres = torch.stack([columns, rows], dim=1).to(maps.dtype)
        return maps.flatten(2)[0].T, likely, centres

    def _decode(self, features: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        """Score and box of each place."""
        raw = self.head(features)
        size = 1 + 2 * raw[:, 3:].sigmoid()
        middle = centres + raw[:, 1:3].tanh()
        return torch.cat([raw[:, :1], middle - size, middle + size], dim=1)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Kept positions (a buffer), how many, and score and box of every position."""
        features, likely, centres = self._features(image)
        found = torch.full((len(likely), 5), float("-inf"), device=image.device)
        places = varout.nonzero(likely, capacity=self.capacity)

        def look(window: OutputWindow) -> None:
            where = window.values
            window.put(found, self._decode(features[where], centres[where]))

        places.each(look)
        kept = varout.nms(found[:, 1:], found[:, 0], iou_threshold=0.5)
        return kept.values, kept.count, found

    def plain(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features, likely, centres = self._features(image)
        places = torch.nonzero(likely).flatten()
        decoded = self._decode(features[places], centres[places])
        left = decoded[:, 0].argsort(descending=True, stable=True).tolist()
        kept = []
        while left:
            best, *rest = left
            kept.append(best)
            overlaps = _iou(decoded[best, 1:], decoded[rest, 1:])
            left = [box for box, share in zip(rest, overlaps.tolist(), strict=True) if share <= 0.5]
        return places[kept], decoded[kept]


def _iou(box: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    low = torch.maximum(box[:2], others[:, :2])
    high = torch.minimum(box[2:], others[:, 2:])
    both = (high - low).clamp(min=0).prod(dim=1)
    area = (box[2:] - box[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(dim=1)
    return both / (area - both)


class MoeBlock(nn.Module):
    """Every token to its two best experts; experts that get more than the capacity run again."""

    def __init__(
        self, width: int = 128, experts: int = 8, choices: int = 2, capacity: int = 64
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / (4 * width) ** 0.5)
        self.choices, self.capacity = choices, capacity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = varout.route(self.gate(x), self.choices, self.capacity)
        out = torch.zeros_like(x)

        def experts(window: OutputWindow) -> None:
            pairs = window.values
            token = pairs // self.choices
            y = torch.bmm(torch.bmm(x[token], self.up).relu(), self.down)
            share = routed.weights.view(-1)[pairs] * window.valid
            out.index_add_(0, token.view(-1), (y * share.unsqueeze(-1)).view(-1, x.shape[1]))

        routed.each(experts)
        return out

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = torch.topk(self.gate(x), self.choices, dim=1)
        weights = best.float().softmax(dim=1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in range(len(self.up)):
            token, choice = torch.nonzero(chosen == expert, as_tuple=True)
            y = (x[token] @ self.up[expert]).relu() @ self.down[expert]
            out.index_add_(0, token, y * weights[token, choice].unsqueeze(-1))
        return out


def detector(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A factory for ``eclip profile`` and mixes: one image, for any batch."""
    torch.manual_seed(0)
    return Detector().cuda().eval(), (torch.randn(1, 3, 256, 256, device="cuda"),)


def moe(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A factory: 128 tokens for each of the batch."""
    torch.manual_seed(0)
    return MoeBlock().cuda().eval(), (torch.randn(128 * batch, 128, device="cuda"),)
