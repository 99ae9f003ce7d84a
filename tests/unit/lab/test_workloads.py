"""The workloads of lab/gpu/visit.py in small, on a CPU, where torch is installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="the workloads need the Python package torch")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("lab.gpu.workloads")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


def test_a_training_step_inside_inference_mode_trains(workloads: Any) -> None:
    shape = workloads.TextShape(vocabulary=50, tokens=8, causal=True, layers=2, width=16, heads=2)
    step, inputs = workloads._train_text(shape, 2)
    with torch.inference_mode():
        losses = [float(step(*inputs)) for _ in range(60)]
    assert losses[-1] < losses[0]
    assert torch.is_inference_mode_enabled() is False


def test_a_step_gives_a_loss_that_may_be_written_over(workloads: Any) -> None:
    """As tests do with the outputs of captures."""
    shape = workloads.TextShape(vocabulary=50, tokens=8, causal=False, layers=1, width=16, heads=2)
    step, inputs = workloads._train_text(shape, 2)
    with torch.inference_mode():
        step(*inputs).zero_()


def test_images_train(workloads: Any) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(5),
    )
    images, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
    net(images)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    step = workloads.TrainingStep(net, torch.nn.functional.cross_entropy, optimizer)
    with torch.inference_mode():
        losses = [float(step(images, labels)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_decoding_continues_what_a_prefill_began(workloads: Any) -> None:
    """The last of a prompt's tokens, decoded on the cache of the others, gives the prompt's answer.

    The cache counts as full, so the prompt fills it.
    """
    shape = workloads.LlamaShape(
        layers=2, width=32, heads=4, groups=2, hidden=48, vocabulary=64, context=6, chunk=6
    )
    prefill, (prompt,) = workloads.llama_prefill(2, shape)
    decode, (_, place) = workloads.llama_decode(2, shape)
    prefill, decode = prefill.float(), decode.float()
    with torch.inference_mode():
        wanted = prefill(prompt)
        decode.load_state_dict(prefill.state_dict())
        for layer in decode.layers:
            layer.keys[:, :, -1] = 0  # the last token's own are to be made by the step
            layer.values[:, :, -1] = 0
        found = decode(prompt[:, -1:], place)
    assert torch.allclose(found, wanted, atol=1e-4)


def test_copies_bring_data_in_and_results_out(workloads: Any) -> None:
    module, inputs = workloads.copies(1)
    with torch.inference_mode():
        module(*inputs)
    assert torch.equal(module.here, module._inbound)
    assert module._outbound.abs().sum() > 0


def test_products_stay_finite(workloads: Any) -> None:
    module, inputs = workloads.products(1)
    with torch.inference_mode():
        found = module(*inputs)
    assert found.dtype == torch.bfloat16 and torch.isfinite(found).all()
