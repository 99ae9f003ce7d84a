"""Variable-output kernels: data-dependent lengths in static plans, never cut off.

The operations below are PyTorch's, except that they give a ``Ragged``: a static buffer, the length
on the device, and no wait for either, so that a model which uses them can be captured. ``each``
runs a consumer over the output window by window inside the graph; ``result`` is the plain tensor,
once a request has completed. The models, the estimates and the reference need no GPU, so each
operation imports what needs one when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eclip.varout.cuda.ragged import Ragged, Routed


def nonzero(x: Any, capacity: int | None = None, arena_words: int = 0) -> Ragged:
    """The positions where ``x`` is not zero, flat, in order.

        found = varout.nonzero(scores > 0.5, capacity=4096)

        def refine(window):  # torch code for up to 4096 positions, window.values
            window.put(out, head(window.take(features)))  # out[values] = head(features[values])

        found.each(refine)  # further windows only if there are more

    Without a capacity there is room for every position. ``arena_words`` keeps what exceeds the
    capacity for ``result``; ``each`` does not need it.
    """
    from eclip.varout.cuda import ops

    return ops.nonzero(x, capacity, arena_words)


def masked_select(x: Any, mask: Any, capacity: int | None = None, arena_words: int = 0) -> Ragged:
    """The elements of ``x`` where ``mask`` holds, in order.

    kept = varout.masked_select(logits, logits > 0, capacity=1024)
    total = torch.zeros((), device="cuda")
    kept.each(lambda window: total.add_(window.values.sum()))  # 0 where a slot holds nothing
    """
    from eclip.varout.cuda import ops

    return ops.masked_select(x, mask, capacity, arena_words)


def expand(lengths: Any, capacity: int, arena_words: int = 0) -> Ragged:
    """Every input's position as often as its length says, like ``torch.repeat_interleave``.

    Nothing bounds the output: windows begin and end inside an input where they must.

        copies = varout.expand(lengths, capacity=65536)
        copies.each(lambda window: work(window.take(tokens), window.valid))
    """
    from eclip.varout.cuda import ops

    return ops.expand(lengths, capacity, arena_words)


def nms(
    boxes: Any,
    scores: Any,
    iou_threshold: float,
    capacity: int | None = None,
    score_threshold: float = float("-inf"),
    arena_words: int = 0,
) -> Ragged:
    """The boxes (x0, y0, x1, y1) that stay, by falling score; scores above a threshold only.

    kept = varout.nms(boxes, scores, iou_threshold=0.5, capacity=300, arena_words=2000)
    ...  # the request completes
    detections = boxes[kept.result()]
    """
    from eclip.varout.cuda import ops

    return ops.nms(boxes, scores, iou_threshold, capacity, score_threshold, arena_words)


def route(logits: Any, choices: int, capacity: int) -> Routed:
    """Tokens to the experts with their largest logits; no token is dropped.

    routed = varout.route(gate(x), choices=2, capacity=256)

    def experts(window):
        pairs = window.values  # [experts, 256] numbers of (token, choice) pairs
        token = pairs // 2
        y = mlp(x[token] * window.valid.unsqueeze(-1))
        y *= (routed.weights.view(-1)[pairs] * window.valid).unsqueeze(-1)
        out.index_add_(0, token.view(-1), y.view(-1, x.shape[-1]))

    routed.each(experts)  # once more for as long as some expert has tokens left
    """
    from eclip.varout.cuda import ops

    return ops.route(logits, choices, capacity)


__all__ = ["expand", "masked_select", "nms", "nonzero", "route"]
