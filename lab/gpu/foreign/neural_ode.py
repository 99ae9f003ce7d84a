"""torchdiffeq: an ODE solver whose steps depend on what it meets."""

import torch
from telling import tell
from torchdiffeq import odeint

torch.manual_seed(0)
field = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)
).cuda()
times = torch.linspace(0, 5, 10, device="cuda")
with torch.inference_mode():
    found = [
        odeint(lambda t, y: field(y), torch.randn(128, 64, device="cuda"), times, rtol=1e-5)
        for _ in range(10)
    ]
tell(*found)
