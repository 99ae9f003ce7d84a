"""transformers: sampling with a key-value cache."""

import torch
from telling import tell
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config()).eval().cuda()
prompt = torch.randint(0, 50_000, (4, 32), device="cuda")
mask = torch.ones_like(prompt)
found = [
    model.generate(
        prompt, attention_mask=mask, max_new_tokens=48, do_sample=sampled, pad_token_id=0
    )
    for sampled in (False, True)
]
tell(*(torch.nn.functional.pad(one, (0, 80 - one.shape[1])) for one in found))
