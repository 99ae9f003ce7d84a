"""PyTorch Lightning: Trainer.fit of its own demo transformer."""

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.demos import Transformer
from telling import tell
from torch.utils.data import DataLoader, TensorDataset


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Transformer(vocab_size=512, dropout=0.0)
        self.losses = []

    def training_step(self, batch, index):
        source, target = batch
        output = self.model(source, target)
        loss = torch.nn.functional.nll_loss(output, target.view(-1))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


seed_everything(0)
words = torch.randint(0, 512, (320, 33))
data = DataLoader(TensorDataset(words[:, :-1], words[:, 1:]), batch_size=8)
module = Language()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
Trainer(max_epochs=1, accelerator="gpu", devices=1, deterministic=True, **quiet).fit(module, data)
tell(torch.stack(module.losses))
