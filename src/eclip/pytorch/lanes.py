"""Lanes for PyTorch: streams on SMs of their own.

torch is imported when a lane is asked for. A GPU's partition (gpu/partition.py) lasts as long as
the process, because its slices come from one split of the GPU: only such slices can be combined.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from eclip.core.device import Closing
from eclip.devices import open_lanes
from eclip.errors import DeviceError, UsageError
from eclip.gpu.partition import Dealt, Partition

if TYPE_CHECKING:
    import torch


class Lane(Closing):
    """SMs of one GPU that belong to this lane, and a PyTorch stream whose kernels run there only.

    In a ``with`` block the lane is the current stream of the thread. A lane holds its SMs until it
    is closed, or collected when neither the lane nor its ``stream`` is in use any more.
    """

    def __init__(self, partition: Partition, dealt: Dealt, device: int, asked: int) -> None:
        self.asked = asked
        self.sms = partition.topology.units_of(dealt.mask)
        self.slices = str(dealt.mask)
        self.device = device
        self._partition = partition
        self._dealt = dealt
        self._entered = threading.local()
        self._end = weakref.finalize(self, partition.give_back, dealt)
        self._end.atexit = False

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream, such as for ``torch.cuda.graph(graph, stream=lane.stream)``."""
        if not self._end.alive:
            raise DeviceError("the lane is closed; ask for another one")
        import torch

        made = torch.cuda.ExternalStream(self._dealt.stream, device=self.device)
        made.lane = self  # so that the SMs are not handed out while the stream is in use
        return made

    def sm_ids(self) -> frozenset[int]:
        """The SMs of this lane by number, as a kernel on the lane finds them in %smid.

        The call waits for the lane's work. On an AMD GPU, the numbers are bits of the CU mask.
        """
        handle = self.stream.cuda_stream
        return self._partition.maker.units_of(self._dealt.mask, handle)

    def close(self) -> None:
        """Wait for the lane's work and give its SMs back. Graphs captured here keep using them."""
        if self._end.alive:
            self._end()
            self._partition.settle()

    def __enter__(self) -> Lane:
        import torch

        entered = torch.cuda.stream(self.stream)
        entered.__enter__()
        self._stack().append(entered)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack().pop().__exit__(*error)

    def __repr__(self) -> str:
        state = "" if self._end.alive else ", closed"
        return f"Lane({self.sms} SMs, slices {self.slices}, device {self.device}{state})"

    def _stack(self) -> list[Any]:
        """What this thread has entered and not left."""
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[Any] = self._entered.stack
        return stack


class Lanes(tuple[Lane, ...]):
    """Lanes of one split. The end of a ``with`` block closes them all."""

    __slots__ = ()

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for lane in self:
            lane.close()


def split(*sms: int, device: int | None = None, overlap: bool = False) -> Lanes:
    """Divide a GPU among PyTorch streams: disjoint lanes of at least so many SMs each.

    A GPU hands out slices (8 SMs on an H200), so a lane may have more SMs than were asked for; a
    warning says how many. Lanes share no SMs with any open lane of this process, unless
    ``overlap`` is true. ``device`` is PyTorch's current device by default::

        with eclip.split(48, 84) as (decode, prefill):
            with decode:
                print(decode.sms, decode.sm_ids())
    """
    partition, index = _partition_of(device)
    lanes = Lanes(
        Lane(partition, dealt, index, asked)
        for asked, dealt in zip(sms, partition.deal(sms, overlap), strict=True)
    )
    _tell(lanes)
    return lanes


def lane(sms: int, *, device: int | None = None, overlap: bool = False) -> Lane:
    """A single lane of at least so many SMs, disjoint from all open lanes of this process.

    The options are those of ``split``::

        lane = eclip.lane(sms=48)
        with lane:
            print(lane)
        lane.close()
    """
    partition, index = _partition_of(device)
    (dealt,) = partition.deal([sms], overlap)
    made = Lane(partition, dealt, index, sms)
    _tell([made])
    return made


_opening = threading.Lock()  # a second partition of a GPU would know nothing of the first


def _tell(lanes: Iterable[Lane]) -> None:
    rounded = [one for one in lanes if one.sms != one.asked]
    if rounded:
        changes = ", ".join(f"{one.asked} became {one.sms}" for one in rounded)
        warnings.warn(f"lanes are whole slices of the GPU, in SMs or CUs: {changes}", stacklevel=3)


def _partition_of(device: int | None) -> tuple[Partition, int]:
    """The partition of this GPU, and PyTorch's index of the GPU."""
    name, index = name_of(device)
    with _opening:
        return _opened(name), index


def name_of(device: int | None) -> tuple[str, int]:
    """eclip's name of a GPU, and PyTorch's index of it; by default PyTorch's current device."""
    try:
        import torch
    except ImportError:
        raise DeviceError("PyTorch is missing; install it: pip install torch") from None
    on_rocm = torch.version.hip is not None
    if torch.version.cuda is None and not on_rocm:
        raise DeviceError(
            f"PyTorch {torch.__version__} is built for CPUs only, so there is no GPU to split; "
            f"install a build for CUDA or ROCm"
        )
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if not isinstance(device, int) or isinstance(device, bool) or device < 0:
        raise UsageError(f"device is the index of a GPU, counted from 0, not {device!r}")
    return f"{'hip' if on_rocm else 'cuda'}:{device}", device


@functools.cache
def _opened(name: str) -> Partition:
    import torch

    before = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    try:
        return Partition(open_lanes(name))
    finally:
        if before is not None:  # eclip has made its own GPU the thread's
            torch.cuda.set_device(before)
