"""Processes of a server: what is given up is gone, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from pathlib import Path

import pytest

from eclip.server.config import read_config
from eclip.server.log import ServerLog
from eclip.server.supervisor.children import Planners
from eclip.server.supervisor.planner_process import PlanRequest


def request(folder: Path, seconds: float) -> PlanRequest:
    return PlanRequest(
        config=read_config("bert:1@300rps/5ms,vgg19:32@background"),
        rates_rps={},
        generation=1,
        folder=str(folder),
        seconds=seconds,
        may_measure=False,
    )


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_a_plan_that_is_given_up_leaves_nothing_behind(tmp_path: Path, pause_s: float) -> None:
    async def give_up() -> int:
        planners = Planners(ServerLog(quiet=True))
        task = asyncio.create_task(planners.plan(request(tmp_path, 60.0)))
        while (pid := planners.pid) is None:
            await asyncio.sleep(0.001)
        await asyncio.sleep(pause_s)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert planners.pid is None
        return pid

    pid = asyncio.run(give_up())
    gc.collect()  # a pipe that is still open would say so now, and fail this test
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
