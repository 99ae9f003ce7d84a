# mypy: ignore-errors
"""A module with a Triton kernel that says where it ran. In a file of its own: Triton reads it."""

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit
def eclip_sighting(source, target, seen, rounds, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(source + places)
    for _ in range(rounds):  # so that every SM gets a block
        values = values * 1.0001 + 0.001
    tl.store(target + places, values)
    here = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r,r", [places], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(seen + places, here)


class Sighting(torch.nn.Module):
    """Matrix products, the kernel, and things that Inductor fuses before and after it."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(256, 1024)
        self.last = torch.nn.Linear(1024, 64)

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.first(x)) * 2 + 1
        changed = torch.empty_like(hidden)
        seen = torch.empty(hidden.shape, dtype=torch.int32, device=hidden.device)
        eclip_sighting[(hidden.numel() // BLOCK,)](hidden, changed, seen, 300, block=BLOCK)
        return torch.softmax(self.last(changed).sigmoid() + 1, dim=-1), seen
