"""Services and the background work beside them, as data: what lab/gpu/visit.py measures."""

from __future__ import annotations

from dataclasses import dataclass

OWN = "lab.gpu.workloads"


@dataclass(frozen=True)
class Pair:
    services: tuple[str, ...]
    background: str

    @property
    def models(self) -> tuple[str, ...]:
        return (*self.services, self.background)


PAIRS: dict[str, Pair] = {
    "bert+vgg": Pair(("bert:1",), "vgg19:32"),
    "resnet+train-gpt": Pair(("resnet50:1",), f"{OWN}:train_gpt:4"),
    "bert+train-resnet": Pair(("bert:1",), f"{OWN}:train_resnet50:32"),
    "mobilenet+train-bert": Pair(("mobilenet_v3:1",), f"{OWN}:train_bert:8"),
    "alexnet+resnet152": Pair(("alexnet:1",), "resnet152:32"),
    "vit+products12": Pair(("vit_b_16:1",), f"{OWN}:products:12"),
    "copies+copies": Pair((f"{OWN}:copies:24",), f"{OWN}:copies:64"),
    "resnet+bert": Pair(("resnet50:1",), "bert:32"),
    "bert8+densenet": Pair(("bert:8",), "densenet201:32"),
    "squeezenet+convnext": Pair(("squeezenet:1",), "convnext:32"),
    "shufflenet+vit": Pair(("shufflenet:1",), "vit_b_16:32"),
    "densenet8+products8": Pair(("densenet201:8",), f"{OWN}:products:8"),
    "albert8+resnext": Pair(("albert:8",), "resnext101:32"),
    "densenet+bert": Pair(("densenet201:1",), "bert:32"),
    "resnet+copies": Pair(("resnet50:1",), f"{OWN}:copies:64"),
    "decode+prefill": Pair((f"{OWN}:llama_decode:8",), f"{OWN}:llama_prefill:1"),
    "three+vgg": Pair(("alexnet:1", "bert:1", "densenet201:1"), "vgg19:32"),
}
# Of workloads that no profile ships for: what is nearest in the zoo, which stands for one on the
# simulator, and the ms that a request takes about, until the device has told.
STAND_INS: dict[str, tuple[str, float]] = {
    f"{OWN}:train_resnet50:32": ("resnet152:32", 17.0),
    f"{OWN}:train_bert:8": ("bert:32", 9.0),
    f"{OWN}:train_gpt:4": ("gpt2:32", 16.0),
    f"{OWN}:products:12": ("vgg19:32", 20.0),
    f"{OWN}:products:8": ("vgg19:32", 6.5),
    f"{OWN}:copies:24": ("alexnet:8", 1.2),
    f"{OWN}:copies:64": ("alexnet:32", 3.0),
    f"{OWN}:llama_decode:8": ("densenet201:8", 5.0),
    f"{OWN}:llama_prefill:1": ("vit_b_16:32", 16.0),
}
