"""Transformers over 128 tokens (ViT: 14x14 patches and a class token), base size.

All four have 12 layers, 768 features and 12 heads; they differ in how they embed, where they
normalise and how many kernels their attention and GELU are written in.
"""

from __future__ import annotations

from eclip.models.zoo.ops import Tape

TOKENS = 128
_LAYERS, _FEATURES, _HEADS = 12, 768, 12
_GPT2_WORDS = 50257
_TOKEN_BYTES = 8


def _encoder_layer(net: Tape, *, gelu_in_steps: bool, cached: bool) -> None:
    net.weights_shared = cached
    with net.holding():
        for _ in ("query", "key", "value"):
            net.linear(_FEATURES, cached=cached)
        net.attention(_HEADS)
        net.linear(_FEATURES, cached=cached)
        net.add()
    net.layer_norm()
    with net.holding():
        net.linear(4 * _FEATURES, cached=cached)
        if gelu_in_steps:
            net.gelu_in_steps()
        else:
            net.gelu()
        net.linear(_FEATURES, cached=cached)
        net.add()
    net.layer_norm()
    net.weights_shared = False


def _text(batch: int, channels: int) -> Tape:
    return Tape(batch, channels, TOKENS, 1, input_bytes=batch * TOKENS * _TOKEN_BYTES)


def _embed(net: Tape, words: int) -> None:
    for step in ("mask_to_float16", "mask_invert", "mask_scale"):
        net.pointwise(step, elements=net.batch * net.positions)
    for table, rows in (("words", words), ("types", 2), ("places", 512)):
        net.embedding(f"embed_{table}", rows)
    net.add()
    net.add()
    net.layer_norm()


def _pool_first_token(net: Tape) -> None:
    net.rows = 1
    net.copy("first_token")
    net.linear(_FEATURES)
    net.pointwise("tanh", flops=6)


def bert(batch: int) -> Tape:
    net = _text(batch, _FEATURES)
    _embed(net, words=30522)
    for _ in range(_LAYERS):
        _encoder_layer(net, gelu_in_steps=False, cached=False)
    _pool_first_token(net)
    return net


def albert(batch: int) -> Tape:
    net = _text(batch, 128)
    _embed(net, words=30000)
    net.linear(_FEATURES)
    for layer in range(_LAYERS):
        # All layers share one set of weights, which the first has brought in.
        _encoder_layer(net, gelu_in_steps=True, cached=layer > 0)
    _pool_first_token(net)
    return net


def gpt2(batch: int) -> Tape:
    net = _text(batch, _FEATURES)
    net.embedding("embed_words", _GPT2_WORDS)
    net.embedding("embed_places", 1024)
    net.add()
    for _ in range(_LAYERS):
        with net.holding():
            net.layer_norm()
            net.linear(3 * _FEATURES)
            net.channels = _FEATURES
            net.attention(_HEADS)
            net.linear(_FEATURES)
            net.add()
        with net.holding():
            net.layer_norm()
            net.linear(4 * _FEATURES)
            net.gelu_in_steps()
            net.linear(_FEATURES)
            net.add()
    net.layer_norm()
    net.weights_shared = True  # with the table of words
    net.linear(_GPT2_WORDS, bias=False)
    return net


def vit_b_16(batch: int) -> Tape:
    net = Tape(batch, 3, 224, 224)
    net.conv(_FEATURES, 16, 16, padding=0, bias=True)
    net.copy("patches_to_tokens")
    net.rows, net.columns = 14 * 14 + 1, 1
    net.concat(_FEATURES)
    net.pointwise("add", operands=2, parameters=(net.positions + 1) * _FEATURES)  # class, places
    for _ in range(_LAYERS):
        with net.holding():
            net.layer_norm()
            net.linear(3 * _FEATURES)
            net.copy("split_heads")
            net.channels = _FEATURES
            net.fused_attention(_HEADS)
            net.copy("heads_to_channels")
            net.linear(_FEATURES)
            net.add()
        with net.holding():
            net.layer_norm()
            net.linear(4 * _FEATURES)
            net.gelu()
            net.linear(_FEATURES)
            net.add()
    net.layer_norm()
    net.rows = 1
    net.linear(1000)
    return net
