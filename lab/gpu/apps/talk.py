"""How a bench talks to the programs beside this one: an order a line, an answer a line."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

Order = list[str]

END_S = 2.0  # for a program whose bench has gone


def say_ready(**more: Any) -> None:
    say(ready=True, pid=os.getpid(), **more)


def say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def orders() -> queue.Queue[Order | None]:
    """What the bench says, while the program does something else; None: it has gone."""
    heard: queue.Queue[Order | None] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            heard.put(line.split())
        heard.put(None)
        time.sleep(END_S)
        os._exit(1)  # nobody waits for what it is in the middle of, and it would disturb others

    threading.Thread(target=listen, daemon=True).start()
    return heard
