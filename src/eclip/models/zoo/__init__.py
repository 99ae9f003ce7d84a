"""The models eclip knows the architecture of, each as the kernels of one forward pass in fp16."""

from __future__ import annotations

from collections.abc import Callable

from eclip.errors import UsageError, unknown_name
from eclip.models.zoo import cnn, transformer
from eclip.models.zoo.ops import Tape

_TEXT: dict[str, Callable[[int], Tape]] = {
    "albert": transformer.albert,
    "bert": transformer.bert,
    "gpt2": transformer.gpt2,
}
_IMAGES: dict[str, Callable[[int], Tape]] = {
    "alexnet": cnn.alexnet,
    "convnext": cnn.convnext,
    "densenet121": cnn.densenet121,
    "densenet201": cnn.densenet201,
    "efficientnet": cnn.efficientnet,
    "mobilenet_v3": cnn.mobilenet_v3,
    "resnet50": cnn.resnet50,
    "resnet152": cnn.resnet152,
    "resnext101": cnn.resnext101,
    "shufflenet": cnn.shufflenet,
    "squeezenet": cnn.squeezenet,
    "vgg19": cnn.vgg19,
    "vit_b_16": transformer.vit_b_16,
}
NAMES = tuple(sorted(_TEXT | _IMAGES))


def forward_pass(model: str, batch: int) -> Tape:
    """The model's kernels in launch order, and the memory that they need."""
    if model not in NAMES:
        raise unknown_name("model", model, NAMES)
    if batch < 1:
        raise UsageError(f"the batch of {model} must be at least 1, not {batch}")
    return (_TEXT | _IMAGES)[model](batch)


def inputs(model: str, batch: int) -> tuple[str, ...]:
    """Shape and type of the model's input, for a person."""
    if model in _TEXT:
        return (f"int64[{batch},{transformer.TOKENS}]",)
    return (f"float16[{batch},3,224,224]",)
