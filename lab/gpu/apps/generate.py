"""A transformers ``generate`` loop: GPT-2 with random weights, one prompt after the other.

    python generate.py

``serve ARRIVALS OUT`` generates for every arrival and writes the latency to the first token and
between tokens in ns, and the tokens.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transformers
from talk import orders, say, say_ready

PROMPT, NEW = 64, 16
AHEAD_NS = 50_000_000
WARM_UP = 3


class Clock(transformers.generation.streamers.BaseStreamer):
    """When every token came; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[int] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter_ns())

    def end(self) -> None:
        pass


def main() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config()
    model = transformers.GPT2LMHeadModel(config).eval().half().cuda()
    made = torch.Generator().manual_seed(2)

    def generate(number: int) -> tuple[list[int], Any]:
        made.manual_seed(number)
        prompt = torch.randint(0, config.vocab_size, (1, PROMPT), generator=made).cuda()
        clock = Clock()
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            streamer=clock,
        )
        torch.cuda.synchronize()
        return clock.times[1:], found[0, PROMPT:].cpu().numpy()

    for number in range(WARM_UP):
        generate(number)
    heard = orders()
    say_ready()
    while (order := heard.get()) is not None:
        arrivals = np.load(order[1])
        first, between, tokens = [], [], []
        begin = time.perf_counter_ns() + AHEAD_NS
        for number, at in enumerate(arrivals.tolist()):
            time.sleep(max(0.0, (begin + at - time.perf_counter_ns()) / 1e9))
            times, found = generate(number)
            first.append(times[0] - begin - at)
            between += np.diff(times).tolist()
            tokens.append(found)
        np.savez(order[2], first=first, between=between, tokens=np.stack(tokens))
        say(served=len(arrivals))


if __name__ == "__main__":
    main()
