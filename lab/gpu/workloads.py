"""Models of our own for lab/gpu/visit.py: training steps, long kernels, copies, a large model.

From the checkout's root a mix names them ``lab.gpu.workloads:train_gpt:4``; what follows the last
colon is the batch, or the size that a factory's text says. Weights and data are random, shapes are
static, nothing waits for the host: each is captured as one graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DEVICE = "cuda"  # tests without a GPU choose another
LEARNING_RATE = 1e-4
MATRICES = 4  # multiplied in one request
MIB = 1 << 20


# --- Training steps ---------------------------------------------------------------------------


class TrainingStep(nn.Module):
    """Forward, backward and the optimizer's update as one call, which gives the loss.

    Captured modules are called in inference mode; a step leaves it. Gradients are made anew in
    every step, so in a capture they live in the capture's own memory.
    """

    def __init__(self, model: nn.Module, loss: Loss, optimizer: Any) -> None:
        super().__init__()
        self.model = model.train()
        self._loss = loss
        self._optimizer = optimizer

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            self._optimizer.zero_grad(set_to_none=True)
            # Its cache would outlive the step, which a capture does not allow.
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, cache_enabled=False):
                loss = self._loss(self.model(inputs), targets)
            loss.backward()
            self._optimizer.step()
            return loss.detach()


def train_resnet50(batch: int) -> Made:
    """ResNet-50 on images of 224 × 224, SGD with momentum."""
    import torchvision

    with _on_device():
        model = torchvision.models.resnet50(weights=None).to(memory_format=torch.channels_last)
        images = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (batch,))
    fused = DEVICE == "cuda"
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, fused=fused)
    return TrainingStep(model, functional.cross_entropy, optimizer), (images, labels)


def train_bert(batch: int) -> Made:
    """A model of BERT-base's shape on 128 tokens that predicts all of them, AdamW."""
    return _train_text(TextShape(vocabulary=30_522, tokens=128, causal=False), batch)


def train_gpt(batch: int) -> Made:
    """A model of GPT-2 small's shape on 512 tokens, AdamW."""
    return _train_text(TextShape(vocabulary=50_257, tokens=512, causal=True), batch)


@dataclass(frozen=True)
class TextShape:
    vocabulary: int
    tokens: int
    causal: bool
    layers: int = 12
    width: int = 768
    heads: int = 12


def _train_text(shape: TextShape, batch: int) -> Made:
    with _on_device():
        model = TextModel(shape)
        tokens = torch.randint(0, shape.vocabulary, (batch, shape.tokens))
        targets = torch.randint(0, shape.vocabulary, (batch, shape.tokens))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=True, capturable=DEVICE == "cuda"
    )
    return TrainingStep(model, _token_loss, optimizer), (tokens, targets)


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TextModel(nn.Module):
    """A transformer over tokens, its head tied to its embedding."""

    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Parameter(0.02 * torch.randn(shape.tokens, shape.width))
        self.blocks = nn.ModuleList([TextBlock(shape) for _ in range(shape.layers)])
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class TextBlock(nn.Module):
    def __init__(self, shape: TextShape) -> None:
        super().__init__()
        width = shape.width
        self._heads, self._causal = shape.heads, shape.causal
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        parts = self.queries_keys_values(self.norms[0](hidden))
        parts = parts.view(batch, tokens, 3, self._heads, width // self._heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = _attention(queries, keys, values, is_causal=self._causal)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        more: torch.Tensor = self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return hidden + more


# --- Kernels of milliseconds, copies of megabytes ---------------------------------------------


class Products(nn.Module):
    """A chain of products of square matrices, one kernel each."""

    def __init__(self, side: int) -> None:
        super().__init__()
        scale = side**-0.5
        made = [scale * torch.randn(side, side) for _ in range(MATRICES)]
        self.matrices = nn.ParameterList([nn.Parameter(one, requires_grad=False) for one in made])

    def forward(self, left: torch.Tensor) -> torch.Tensor:
        for right in self.matrices:
            left = left @ right
        return left


def products(thousands: int) -> Made:
    """bf16 products of matrices with so many × 1024 rows: 8 take about 1.6 ms each on an H200,
    12 about 5 ms."""
    side = 1024 * thousands
    with _on_device(torch.bfloat16):
        return Products(side), (torch.randn(side, side),)


class Copies(nn.Module):
    """Data from pinned host memory, some work on it, and the result back, all in the graph.

    A kernel stands before the first copy and behind the last: what a copy takes is a gap between
    kernels, and in a profile a gap belongs to the kernel before it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        pinned = DEVICE == "cuda"
        self._inbound = torch.randn(size, 1024, dtype=torch.bfloat16, device="cpu")
        self._outbound = torch.zeros(size, 1024, dtype=torch.bfloat16, device="cpu")
        if pinned:
            self._inbound, self._outbound = self._inbound.pin_memory(), self._outbound.pin_memory()
        self.register_buffer("here", torch.zeros(size, 1024))
        self.weights = nn.Parameter(torch.randn(1024, 1024) / 32, requires_grad=False)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        doubled = scale * 2
        self.here.copy_(self._inbound, non_blocking=True)
        result = functional.gelu((self.here * doubled) @ self.weights)
        self._outbound.copy_(result, non_blocking=True)
        return result[:1] + doubled


def copies(mib: int) -> Made:
    """So many MiB to the GPU and as many back."""
    with _on_device(torch.bfloat16):
        return Copies(mib * MIB // (2 * 1024)), (torch.ones(1),)


# --- A model of Llama-8B's shape --------------------------------------------------------------


@dataclass(frozen=True)
class LlamaShape:
    layers: int = 32
    width: int = 4096
    heads: int = 32
    groups: int = 8  # of heads that share keys and values
    hidden: int = 14_336
    vocabulary: int = 128_256
    context: int = 2048  # tokens that the cache holds
    chunk: int = 512  # tokens of a prefill

    @property
    def head(self) -> int:
        return self.width // self.heads


class LlamaLayer(nn.Module):
    def __init__(self, shape: LlamaShape, batch: int) -> None:
        super().__init__()
        self._shape = shape
        self.norms = nn.ModuleList([nn.RMSNorm(shape.width, eps=1e-5) for _ in range(2)])
        self.queries_keys_values = nn.Linear(
            shape.width, (shape.heads + 2 * shape.groups) * shape.head, bias=False
        )
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate_and_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        cached = (batch, shape.groups, shape.context, shape.head)
        self.register_buffer("keys", torch.randn(cached))
        self.register_buffer("values", torch.randn(cached))

    def forward(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], place: Any
    ) -> torch.Tensor:
        hidden = hidden + self.out(self._attend(self.norms[0](hidden), turn, place))
        gate, up = self.gate_and_up(self.norms[1](hidden)).chunk(2, dim=-1)
        more: torch.Tensor = self.down(functional.silu(gate) * up)
        return hidden + more

    def _attend(
        self, hidden: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], place: Any
    ) -> torch.Tensor:
        """One token against the whole cache (``place``: where it goes there), or a prompt's first
        tokens against each other (None)."""
        shape = self._shape
        batch, tokens, _ = hidden.shape
        parts = self.queries_keys_values(hidden)
        parts = parts.view(batch, tokens, shape.heads + 2 * shape.groups, shape.head).transpose(
            1, 2
        )
        queries, keys, values = parts.split((shape.heads, shape.groups, shape.groups), dim=1)
        queries, keys = _turned(queries, *turn), _turned(keys, *turn)
        if place is None:
            self.keys[:, :, :tokens].copy_(keys)
            self.values[:, :, :tokens].copy_(values)
            seen = _attention(queries, keys, values, is_causal=True, enable_gqa=True)
            return seen.transpose(1, 2).reshape(batch, tokens, shape.width)
        self.keys.index_copy_(2, place, keys)
        self.values.index_copy_(2, place, values)
        # The heads of a group read the same keys, as several tokens of one head would.
        grouped = queries.reshape(batch, shape.groups, -1, shape.head)
        seen = _attention(grouped, self.keys, self.values)
        return seen.reshape(batch, tokens, shape.width)


def _turned(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Llama(nn.Module):
    """Weights, a cache and tables of angles; what a request does is in the two classes below."""

    def __init__(self, shape: LlamaShape, batch: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList([LlamaLayer(shape, batch) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        exponents = torch.arange(0, shape.head, 2, dtype=torch.float32) / shape.head
        places = torch.arange(shape.context, dtype=torch.float32)
        angles = places[:, None] * 500_000.0 ** -exponents[None, :]
        self.register_buffer("cosines", angles.cos().to(self.head.weight.dtype))
        self.register_buffer("sines", angles.sin().to(self.head.weight.dtype))
        self.requires_grad_(False)

    def run(
        self, tokens: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor], place: Any = None
    ) -> torch.Tensor:
        """What is said about the token behind the last one."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, turn, place)
        logits: torch.Tensor = self.head(self.norm(hidden[:, -1]))
        return logits


class Decode(Llama):
    """One more token for every sequence of the batch, whose cache is full."""

    def forward(self, tokens: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        turn = (self.cosines.index_select(0, place), self.sines.index_select(0, place))
        return self.run(tokens, turn, place)


class Prefill(Llama):
    """The first tokens of a prompt."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count = tokens.shape[1]
        return self.run(tokens, (self.cosines[:count], self.sines[:count]))


def llama_decode(batch: int, shape: LlamaShape | None = None) -> Made:
    shape = shape or LlamaShape()
    with _on_device(torch.bfloat16):
        tokens = torch.randint(0, shape.vocabulary, (batch, 1))
        return Decode(shape, batch), (tokens, torch.tensor([shape.context - 1]))


def llama_prefill(batch: int, shape: LlamaShape | None = None) -> Made:
    shape = shape or LlamaShape()
    with _on_device(torch.bfloat16):
        tokens = torch.randint(0, shape.vocabulary, (batch, shape.chunk))
        return Prefill(shape, batch), (tokens,)


class Adder(nn.Module):
    def forward(self, a: Any, b: Any) -> Any:
        return a + b


def add(batch: int) -> Made:
    """What lab/serving/faults.py serves: the answer is known for a request in any batch."""
    with torch.device(DEVICE):
        numbers = torch.zeros(batch, 4, dtype=torch.int32)
        return Adder(), (numbers, numbers.clone())


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Not by cuDNN: it compiles kernels while running, for one context, so they could not move."""
    kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kinds):
        seen: torch.Tensor = functional.scaled_dot_product_attention(
            queries, keys, values, **options
        )
        return seen


@contextlib.contextmanager
def _on_device(kind: torch.dtype = torch.float32) -> Iterator[None]:
    """Tensors are made on the device with this type; drawing large ones on a CPU takes seconds."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device(DEVICE):
            yield
    finally:
        torch.set_default_dtype(before)
