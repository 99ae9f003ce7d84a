"""Models from files behind a server: torch.export and TorchScript, as people save them, on the CPU.

What has no profile is measured at the first start. So nobody else may use the GPU, this process
included: it runs the model only after the server has ended.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from served_core import Driver, config_of, request

pytestmark = pytest.mark.alone

BATCH = 4
PATIENCE_S = 200.0
FILES = {"traced": "traced.ts", "exported": "exported.pt2"}
TENSORS = {
    "inputs": [{"name": "image", "datatype": "FP32", "shape": [3, 8, 8]}],
    "outputs": [{"name": "scores", "datatype": "FP32", "shape": [10]}],
}


def test_files_are_served_as_torch_runs_them(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10)
    ).eval()
    example = torch.randn(BATCH, 3, 8, 8)
    torch.jit.trace(module, example).save(str(tmp_path / FILES["traced"]))
    rows = torch.export.Dim("rows", min=1, max=64)
    exported = torch.export.export(module, (example,), dynamic_shapes=({0: rows},))
    torch.export.save(exported, tmp_path / FILES["exported"])
    services = [
        {"name": name, "file": str(tmp_path / file), "batches": [BATCH], **TENSORS}
        for name, file in FILES.items()
    ]
    given = np.random.default_rng(0).standard_normal((BATCH, 3, 8, 8)).astype(np.float32)
    config = config_of(*services, device="cuda", profiles=[str(tmp_path / "profiles")])
    found = {}
    with Driver(config) as driver:
        for name in FILES:
            asked = request(name, {"image": given})
            (answer,) = driver(driver.served.core.infer(asked), PATIENCE_S).outputs
            found[name] = np.frombuffer(answer.data.tobytes(), np.float32).reshape(BATCH, 10)
    with torch.inference_mode():
        wanted = module.cuda()(torch.from_numpy(given).cuda()).cpu().numpy()
    for name in FILES:
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-5, err_msg=name)
