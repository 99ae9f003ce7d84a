"""Convolutional networks over 224x224 images, as torchvision defines them (SqueezeNet: 1.1)."""

from __future__ import annotations

import contextlib

from eclip.models.zoo.ops import HALF, Tape


def _images(batch: int) -> Tape:
    return Tape(batch, 3, 224, 224)


def _classify(net: Tape) -> Tape:
    net.adaptive_pool()
    net.linear(1000)
    return net


def _conv_norm(
    net: Tape, out: int, kernel: int, stride: int = 1, groups: int = 1, act: str = ""
) -> None:
    net.conv(out, kernel, stride, groups=groups)
    net.batch_norm()
    if act:
        net.pointwise(act, flops=1 if act == "relu" else 5)


# AlexNet, VGG, SqueezeNet: convolutions with a bias and no normalisation. The probe runs counted 28
# and 63 launches for the first two, which leaves no room for turning tensors to channels last.


def _conv_bias(net: Tape, out: int, kernel: int, stride: int = 1, padding: int = 1) -> None:
    net.conv(out, kernel, stride, padding=padding, bias=True, transposes=False)
    net.relu()


def _fully_connected(net: Tape) -> Tape:
    net.channels *= net.positions
    net.rows = net.columns = 1
    for _ in range(2):
        net.linear(4096)
        net.relu()
    net.linear(1000)
    return net


def alexnet(batch: int) -> Tape:
    net = _images(batch)
    _conv_bias(net, 64, 11, 4, padding=2)
    net.pool(3, 2)
    _conv_bias(net, 192, 5, padding=2)
    net.pool(3, 2)
    for out in (384, 256, 256):
        _conv_bias(net, out, 3)
    net.pool(3, 2)
    net.adaptive_pool(6)
    return _fully_connected(net)


def vgg19(batch: int) -> Tape:
    net = _images(batch)
    for out, convs in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convs):
            _conv_bias(net, out, 3)
        net.pool(2, 2)
    net.adaptive_pool(7)
    return _fully_connected(net)


def squeezenet(batch: int) -> Tape:
    net = _images(batch)
    _conv_bias(net, 64, 3, 2, padding=0)
    for squeeze, fires in ((16, 2), (32, 2), (48, 2), (64, 2)):
        if squeeze != 64:
            net.pool(3, 2)
        expand = squeeze * 4
        for _ in range(fires):
            _conv_bias(net, squeeze, 1, padding=0)
            side = net.rows
            with net.holding():
                _conv_bias(net, expand, 1, padding=0)
                with net.holding():
                    net.resume(squeeze, side)
                    _conv_bias(net, expand, 3)
                    net.concat(2 * expand)
    _conv_bias(net, 1000, 1, padding=0)
    net.adaptive_pool()
    return net


# ResNets


def _resnet(batch: int, depths: tuple[int, ...], *, groups: int = 1, widen: int = 1) -> Tape:
    net = _images(batch)
    _conv_norm(net, 64, 7, 2, act="relu")
    net.pool(3, 2, padding=1)
    for stage, depth in enumerate(depths):
        planes = 64 << stage
        for block in range(depth):
            into, side = net.channels, net.rows
            stride = 2 if stage and not block else 1
            with net.holding():
                _conv_norm(net, planes * widen, 1, act="relu")
                _conv_norm(net, planes * widen, 3, stride, groups, act="relu")
                _conv_norm(net, planes * 4, 1)
                if not block:
                    with net.holding():
                        net.resume(into, side)
                        _conv_norm(net, planes * 4, 1, stride)
                net.add()
            net.relu()
    return _classify(net)


def resnet50(batch: int) -> Tape:
    return _resnet(batch, (3, 4, 6, 3))


def resnet152(batch: int) -> Tape:
    return _resnet(batch, (3, 8, 36, 3))


def resnext101(batch: int) -> Tape:
    return _resnet(batch, (3, 4, 23, 3), groups=32, widen=4)


# DenseNets


def _densenet(batch: int, depths: tuple[int, ...]) -> Tape:
    net = _images(batch)
    _conv_norm(net, 64, 7, 2, act="relu")
    net.pool(3, 2, padding=1)
    for stage, depth in enumerate(depths):
        channels = net.channels
        for _ in range(depth):
            with net.holding(net.batch * channels * net.positions * HALF):
                net.concat(channels)  # every layer copies all that came before it
                net.batch_norm()
                net.relu()
                _conv_norm(net, 128, 1, act="relu")
                net.conv(32, 3)
            channels += 32
        with net.holding(net.batch * channels * net.positions * HALF):
            net.concat(channels)
        net.batch_norm()
        net.relu()
        if stage < len(depths) - 1:
            net.conv(channels // 2, 1)
            net.pool(2, 2, name="avg_pool")
    return _classify(net)


def densenet121(batch: int) -> Tape:
    return _densenet(batch, (6, 12, 24, 16))


def densenet201(batch: int) -> Tape:
    return _densenet(batch, (6, 12, 48, 32))


# Networks of depthwise convolutions


def shufflenet(batch: int) -> Tape:
    net = _images(batch)
    _conv_norm(net, 24, 3, 2, act="relu")
    net.pool(3, 2, padding=1)
    for out, units in ((116, 4), (232, 8), (464, 4)):
        half = out // 2
        for unit in range(units):
            into, side = net.channels, net.rows
            with net.holding():
                branch_bytes = 0
                if unit == 0:
                    _conv_norm(net, into, 3, 2, groups=into)
                    _conv_norm(net, half, 1, act="relu")
                    branch_bytes = net.tensor_bytes
                    net.resume(into, side)
                else:
                    net.channels = half
                    net.copy("half_of_channels")
                with net.holding(branch_bytes):
                    _conv_norm(net, half, 1, act="relu")
                    _conv_norm(net, half, 3, 2 if unit == 0 else 1, groups=half)
                    _conv_norm(net, half, 1, act="relu")
                    net.concat(out)
            net.copy("shuffle_channels")
    _conv_norm(net, 1024, 1, act="relu")
    return _classify(net)


def _squeeze_excite(net: Tape, squeeze: int, act: str, gate: str) -> None:
    channels, rows = net.channels, net.rows
    with net.holding():
        net.adaptive_pool()
        net.conv(squeeze, 1, bias=True)
        net.pointwise(act, flops=5)
        net.conv(channels, 1, bias=True)
        net.pointwise(gate, flops=5)
        net.rows = net.columns = rows
        net.pointwise("scale_channels")


def _inverted_residual(
    net: Tape, out: int, kernel: int, stride: int, expand: int, act: str, squeeze: int, gate: str
) -> None:
    into = net.channels
    residual = stride == 1 and into == out
    with net.holding() if residual else contextlib.nullcontext():
        if expand != into:
            _conv_norm(net, expand, 1, act=act)
        _conv_norm(net, expand, kernel, stride, groups=expand, act=act)
        if squeeze:
            _squeeze_excite(net, squeeze, "relu" if gate == "hardsigmoid" else act, gate)
        _conv_norm(net, out, 1)
        if residual:
            net.add()


def mobilenet_v3(batch: int) -> Tape:
    net = _images(batch)
    _conv_norm(net, 16, 3, 2, act="hardswish")
    for kernel, expand, out, squeeze, act, stride in (
        (3, 16, 16, 0, "relu", 1),
        (3, 64, 24, 0, "relu", 2),
        (3, 72, 24, 0, "relu", 1),
        (5, 72, 40, 24, "relu", 2),
        (5, 120, 40, 32, "relu", 1),
        (5, 120, 40, 32, "relu", 1),
        (3, 240, 80, 0, "hardswish", 2),
        (3, 200, 80, 0, "hardswish", 1),
        (3, 184, 80, 0, "hardswish", 1),
        (3, 184, 80, 0, "hardswish", 1),
        (3, 480, 112, 120, "hardswish", 1),
        (3, 672, 112, 168, "hardswish", 1),
        (5, 672, 160, 168, "hardswish", 2),
        (5, 960, 160, 240, "hardswish", 1),
        (5, 960, 160, 240, "hardswish", 1),
    ):
        _inverted_residual(net, out, kernel, stride, expand, act, squeeze, "hardsigmoid")
    _conv_norm(net, 960, 1, act="hardswish")
    net.adaptive_pool()
    net.linear(1280)
    net.pointwise("hardswish", flops=5)
    net.linear(1000)
    return net


def efficientnet(batch: int) -> Tape:
    net = _images(batch)
    _conv_norm(net, 32, 3, 2, act="silu")
    for factor, kernel, first_stride, out, depth in (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    ):
        for block in range(depth):
            into = net.channels
            stride = 1 if block else first_stride
            squeeze = into // 4
            _inverted_residual(net, out, kernel, stride, into * factor, "silu", squeeze, "sigmoid")
    _conv_norm(net, 1280, 1, act="silu")
    return _classify(net)


def convnext(batch: int) -> Tape:
    """Its normalisations and its pointwise layers want channels last, its convolutions do not."""
    net = _images(batch)
    net.conv(96, 4, 4, padding=0, bias=True)
    net.copy("nchw_to_nhwc")
    net.layer_norm()
    net.copy("nhwc_to_nchw")
    for out, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if out != net.channels:
            net.copy("nchw_to_nhwc")
            net.layer_norm()
            net.copy("nhwc_to_nchw")
            net.conv(out, 2, 2, padding=0, bias=True)
        for _ in range(depth):
            with net.holding():
                net.conv(out, 7, groups=out, bias=True)
                net.copy("nchw_to_nhwc")
                net.layer_norm()
                net.linear(4 * out)
                net.gelu()
                net.linear(out)
                net.copy("nhwc_to_nchw")
                net.pointwise("scale_channels", weights=out)
                net.add()
    net.adaptive_pool()
    net.layer_norm()
    net.linear(1000)
    return net
