"""Random fleets, by family: what the services of each are like.

``small``: batch 1, bounds of 3 to 20 requests. ``batched``: batches of 8 and 32. ``mixed``: both,
with rates that differ a hundredfold. ``hot``: mixed, and every tenth service asks for more than a
GPU has. ``kinds``: mixed, on three kinds of GPUs.
"""

from __future__ import annotations

import numpy as np

from eclip.core.model_key import ModelKey
from eclip.fleet.config import find_kinds
from eclip.fleet.place.scores import GpuKind
from eclip.fleet.place.spec import Fleet, GpuGroup, Service

FAMILIES = ("small", "batched", "mixed", "hot", "kinds")
MODELS = (
    "albert", "alexnet", "bert", "convnext", "densenet121", "efficientnet", "gpt2", "mobilenet_v3",
    "resnet152", "resnet50", "resnext101", "shufflenet", "squeezenet", "vgg19", "vit_b_16",
)  # fmt: skip
_BATCHES = {"small": (1,), "batched": (8, 32)}
_GPUS_A_MACHINE = 8


def random_fleet(family: str, services: int, gpus: int, seed: int) -> Fleet:
    """So many services, and up to so many GPUs in machines of eight."""
    random = np.random.default_rng([FAMILIES.index(family), services, seed])
    names = ("h200", "h100", "a100") if family == "kinds" else ("h200",)
    reference = _reference()
    drawn = []
    for number in range(services):
        batch = int(random.choice(_BATCHES.get(family, (1, 8, 32))))
        model = ModelKey(str(random.choice(MODELS)), batch)
        request_s = reference.request_ns(model) / 1e9
        if family in ("small", "batched"):
            load = random.uniform(0.03, 0.3)
        else:
            load = 10 ** random.uniform(-2.3, -0.3)
        if family == "hot" and number % 10 == 0:
            load = random.uniform(0.8, 3.0)
        slow = 6.0 if family == "kinds" else 1.0  # so that every kind can serve it
        drawn.append(
            Service(
                name=f"s{number}",
                model=model,
                rate_rps=float(load / request_s),
                bound_ms=float(slow * 1e3 * request_s * random.choice([3, 5, 10, 20])),
                weight=float(random.choice([1, 2, 5])),
            )
        )
    groups = [
        GpuGroup(machine=f"m{number}", kind=names[number % len(names)], count=_GPUS_A_MACHINE)
        for number in range(max(2, -(-gpus // _GPUS_A_MACHINE)))
    ]
    return Fleet(services=tuple(drawn), gpus=tuple(groups))


_KIND: dict[str, GpuKind] = {}


def _reference() -> GpuKind:
    if not _KIND:
        _KIND.update(all_kinds(("h200",)))
    return _KIND["h200"]


def all_kinds(names: tuple[str, ...]) -> dict[str, GpuKind]:
    """Kinds with the profiles of all models that families draw from."""
    services = tuple(
        Service(name=f"{model}:{batch}", model=ModelKey(model, batch), rate_rps=1, bound_ms=1)
        for model in MODELS
        for batch in (1, 8, 32)
    )
    groups = tuple(GpuGroup(machine=name, kind=name) for name in names)
    return find_kinds(Fleet(services=services, gpus=groups))
