"""``eclip.colocate``: models from Python on the lanes of a plan."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import eclip
from eclip.cuda.device import CudaDevice
from eclip.errors import DeviceError, UsageError

torch = pytest.importorskip("torch", reason="tests on a GPU need the Python package torch")


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    deep = [part for _ in range(8) for part in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    wide = [torch.nn.Conv2d(8, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 3)]
    return {
        "deep": (torch.nn.Sequential(*deep).cuda().eval(), [torch.randn(64, 512, device="cuda")]),
        "wide": (torch.nn.Sequential(*wide).cuda().eval(), [torch.randn(4, 8, 64, 64).cuda()]),
    }


@pytest.mark.parametrize("policy", ["shared", "model", "eclip"])
def test_calls_give_the_models_outputs_from_several_threads(
    policy: str, device: CudaDevice
) -> None:
    given = models()
    wrong: list[str] = []

    def use(gpu: Any, name: str) -> None:
        module, (example,) = given[name]
        torch.cuda.set_device(device.gpu.index)
        for _ in range(20):
            x = torch.randn_like(example)
            with torch.inference_mode():
                wanted = module(x)
            # Other algorithms may be chosen in a capture: close, not equal.
            if not torch.allclose(gpu[name](x), wanted, rtol=1e-2, atol=1e-2):
                wrong.append(name)

    with eclip.colocate(given, policy=policy) as gpu:
        assert gpu.plan.policy == policy
        threads = [threading.Thread(target=use, args=(gpu, name)) for name in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = gpu["deep"](*given["deep"][1])
        kept = first.clone()
        gpu["deep"](torch.zeros_like(given["deep"][1][0]))
        assert torch.equal(first, kept), "an output is the caller's to keep"
        with pytest.raises(UsageError, match="deep, wide"):
            gpu["high"]
        with pytest.raises(DeviceError, match="capture it again for this shape"):
            gpu["deep"](torch.randn(3, 512, device="cuda"))
    assert wrong == []


def test_a_policy_that_does_not_run_inside_one_process_is_refused_and_all_is_released(
    device: CudaDevice,
) -> None:
    with pytest.raises(UsageError, match="timeslice needs a process for each model"):
        eclip.colocate(models(), policy="timeslice")
    with eclip.colocate(models(), policy="shared") as gpu:
        assert set(gpu.plan.main.active) == {0, 1}
