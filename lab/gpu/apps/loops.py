"""A background program: steps back to back between two orders, and how many they were."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from talk import orders, say, say_ready

IN_FLIGHT = 8  # steps after which it waits for the GPU, as loops that print a loss do


def run_steps(step: Callable[[], None]) -> None:
    """``run`` begins, ``halt`` ends; answers with steps and seconds."""
    heard = orders()
    say_ready()
    while (order := heard.get()) is not None:
        if order != ["run"]:
            raise SystemExit(f"a background program does not know the order {order}")
        say(running=True)
        steps, begin = 0, time.perf_counter()
        while heard.empty():
            step()
            steps += 1
            if steps % IN_FLIGHT == 0:
                torch.cuda.synchronize()
        heard.get()
        torch.cuda.synchronize()
        say(steps=steps, seconds=time.perf_counter() - begin)
