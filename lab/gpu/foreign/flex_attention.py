"""torch: compiled FlexAttention, a Triton template with a mask of one's own."""

import torch
from telling import tell
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch.manual_seed(0)
attend = torch.compile(flex_attention)
mask = create_block_mask(lambda b, h, q, k: q - k <= 256, 1, 1, 1024, 1024, device="cuda")
found = []
for _ in range(40):
    q, k, v = (torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.half) for _ in range(3))
    found.append(attend(q, k, v, block_mask=mask))
tell(*found)
