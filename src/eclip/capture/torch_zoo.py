"""The zoo's models, built by their libraries with random weights.

fp16, inference mode, images channels last (best for the matrix units). Normalisation statistics
come from one training-mode pass over random images, so that outputs are finite and depend on the
input. Text models read 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eclip.errors import unknown_name

SEQUENCE = 128
IMAGE = 224


def build(
    model: str, batch: int, seed: int = 0
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The module on the GPU and example inputs."""
    if model not in _BUILDERS:
        raise unknown_name("model", model, _BUILDERS)
    torch.manual_seed(seed)
    with torch.device("cuda"):  # drawing the weights of a large model on a CPU takes seconds
        module, inputs = _BUILDERS[model](batch)
    for weights in module.parameters():
        if weights.dim() > 1 and not weights.any():  # a zero head would hide every mistake
            torch.nn.init.normal_(weights, std=0.02)
    return module.eval().half().cuda(), inputs


def _images(batch: int) -> torch.Tensor:
    images = torch.randn(batch, 3, IMAGE, IMAGE, dtype=torch.float16)
    return images.to(memory_format=torch.channels_last)


def _vision(name: str) -> Callable[[int], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    def make(batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        import torchvision

        module = torchvision.models.get_model(name, weights=None)
        _settle_statistics(module)
        return module.to(memory_format=torch.channels_last), (_images(batch),)

    return make


def _settle_statistics(module: torch.nn.Module) -> None:
    norms = [part for part in module.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    for part in norms:
        part.momentum = None  # a plain average, so that one pass suffices
    module.train()
    with torch.no_grad():
        module(torch.randn(16, 3, IMAGE, IMAGE))
    module.eval()


class _FirstOutput(torch.nn.Module):
    """A text model that gives its hidden states and nothing it would have to build a dict for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=tokens)[0]
        return hidden


def _text(name: str) -> Callable[[int], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    def make(batch: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
        import transformers

        config = getattr(transformers, f"{name}Config")
        if name == "Albert":  # the library's default is the xxlarge size
            config = config(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
        else:
            config = config()
        config.use_cache = False
        model = getattr(transformers, f"{name}Model")(config)
        vocabulary = config.vocab_size
        tokens = torch.randint(0, vocabulary, (batch, SEQUENCE))
        return _FirstOutput(model), (tokens,)

    return make


_BUILDERS: dict[str, Callable[[int], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]] = {
    "albert": _text("Albert"),
    "bert": _text("Bert"),
    "gpt2": _text("GPT2"),
    "vit_b_16": _vision("vit_b_16"),
    "resnet50": _vision("resnet50"),
    "resnet152": _vision("resnet152"),
    "resnext101": _vision("resnext101_32x8d"),
    "densenet121": _vision("densenet121"),
    "densenet201": _vision("densenet201"),
    "vgg19": _vision("vgg19"),
    "alexnet": _vision("alexnet"),
    "squeezenet": _vision("squeezenet1_1"),
    "shufflenet": _vision("shufflenet_v2_x1_0"),
    "mobilenet_v3": _vision("mobilenet_v3_large"),
    "efficientnet": _vision("efficientnet_b0"),
    "convnext": _vision("convnext_tiny"),
}
