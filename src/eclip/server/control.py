"""Control: what the server tells its processes, and what they answer.

One message a packet of a socket pair, as msgpack; descriptors travel along. A socket that ends
means that the process at its other end has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence

import msgspec

from eclip.core.device import Closing
from eclip.server.config import ServerSettings, ServiceSettings
from eclip.server.link import SlotLayout
from eclip.server.messages import ModelInfo

_PACKET = 1 << 20
_BUFFER = 4 << 20
_DESCRIPTORS = 64  # of a packet: more than a plan has workers


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A service as it is deployed. A service that runs otherwise than before has another id."""

    id: int
    row: int  # of the counters; its name keeps it
    settings: ServiceSettings
    info: ModelInfo
    buckets: tuple[int, ...]
    times_ns: tuple[int, ...]  # per bucket, with the device to itself
    costs_ns: tuple[int, ...]  # per bucket, while all instances on the device are busy
    least_costs_ns: tuple[int, ...]  # per bucket, while one instance of every service is
    parts: tuple[float, ...]  # per bucket, of the device, that it fills; 0: it waits for no room
    bound_ns: int | None
    slots: SlotLayout
    function: str | None = None  # module:function, where a CPU gives the answers
    timing_only: bool = False  # nothing is computed: the one output says how long it took

    @property
    def name(self) -> str:
        return self.settings.name


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What the device process is to run: the plan's workers are, in this order, every service's
    instances, and of each its buckets."""

    generation: int
    server: ServerSettings
    specs: tuple[ServiceSpec, ...]
    plan: str  # a file
    rates_rps: dict[str, float]  # that it was planned for
    assumed: tuple[str, ...]  # services of unknown rate
    uuid: str | None  # of the device; None: modelled, so no other server uses it
    device: str  # for a person, as what follows
    slices: int
    homes: dict[str, tuple[int, ...]]
    policy: str
    notes: tuple[str, ...] = ()  # for the log
    parts: dict[str, float] = {}  # seconds of planning, by what was done; for the log

    @property
    def groups(self) -> list[ServiceSpec]:
        """What each loop of the device process serves: one for every instance."""
        return [spec for spec in self.specs for _ in range(spec.settings.replicas)]

    @property
    def known_rps(self) -> dict[str, float]:
        return {name: rate for name, rate in self.rates_rps.items() if name not in self.assumed}

    @property
    def in_words(self) -> dict[str, str]:
        """By service: ``2 instances, batches of 1, 8``"""
        return {
            spec.name: f"{spec.settings.replicas} instance{'s' * (spec.settings.replicas > 1)}, "
            f"batches of {', '.join(map(str, spec.buckets))}"
            for spec in self.specs
        }

    def does_all_of(self, planned: Deployment) -> bool:
        """Whether it serves other rates, of the same services, as well as what was planned for
        them. Opening a generation may disturb requests in flight, and instances that are not
        needed cost memory only. How background gives way was searched for, for these rates."""
        runs = {spec.name: spec for spec in self.specs}
        return all(
            spec.settings.tier == "service"
            and spec.settings.replicas <= runs[spec.name].settings.replicas
            and set(spec.buckets) <= set(runs[spec.name].buckets)
            for spec in planned.specs
        )


# --- To the device process ---------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A front has begun, with the descriptor that is rung when a batch of it has ended."""

    front: int


class AttachRings(msgspec.Struct, frozen=True, tag=True):
    """A front's rings of a generation, with their memory; to the front, too, which uses them from
    the next offer on. It gets descriptors to ring behind the memory, of which ``bells`` tells one
    for each group."""

    front: int
    generation: int
    rows: tuple[int, ...]  # of the ring of each group
    first: dict[int, int]  # by service id: its first group; its instances follow
    bells: tuple[int, ...]


class Detach(msgspec.Struct, frozen=True, tag=True):
    """A front has ended: say Detached when nothing of it runs any more."""

    front: int


class AttachSlots(msgspec.Struct, frozen=True, tag=True):
    """A service's slots of one front, with their descriptor."""

    front: int
    service: int
    layout: SlotLayout


class AttachCounters(msgspec.Struct, frozen=True, tag=True):
    """With their descriptor."""

    fronts: int


class Deploy(msgspec.Struct, frozen=True, tag=True):
    """Open this beside what runs, warm it, and say Deployed."""

    deployment: Deployment


class Retire(msgspec.Struct, frozen=True, tag=True):
    """End all generations before this one, when what they run has ended."""

    before: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End, when what runs has ended."""


# --- From the device process -------------------------------------------------------------------


class Deployed(msgspec.Struct, frozen=True, tag=True):
    """With the descriptors that submitters ring."""

    generation: int
    seconds: float
    failed: dict[int, str]  # services that could not be loaded, and why
    bells: tuple[int, ...] = ()  # for each group, which descriptor
    parts: dict[str, float] = {}  # seconds, by what was done; for the log


class NotDeployed(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str


class Detached(msgspec.Struct, frozen=True, tag=True):
    front: int


class Retired(msgspec.Struct, frozen=True, tag=True):
    """Older generations have ended; to fronts, too: what is open there never began."""

    before: int


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line for the log."""

    line: str


# --- To a front --------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The first message: with the descriptor that says that a batch has ended, and the
    counters'."""

    front: int
    attachments: int  # of fronts and guests: the counters have a page for each, and one more
    server: ServerSettings  # with the ports that were found free
    regions: str  # a folder that all fronts share


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The services from now on. Say Settled when nothing of services that are gone is open."""

    number: int
    specs: tuple[ServiceSpec, ...]
    deployed: tuple[int, ...]  # the ids, also of services that could not be loaded: slots stay
    known: tuple[ModelInfo, ...]  # of all that are configured
    idle: dict[
        str, str
    ]  # not loaded, and why they should be but are not; empty: it was not asked for
    device: str = ""  # for a person, as what follows
    slices: int = 0
    homes: dict[str, tuple[int, ...]] = {}  # the slices that a service's kernels run on
    plan: str = ""
    restarts: int = 0


class DeviceUp(msgspec.Struct, frozen=True, tag=True):
    epoch: int


class DeviceDown(msgspec.Struct, frozen=True, tag=True):
    """Its process has ended: what was open there runs again, once."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """``now``: answer what is open, then end. Otherwise: say that you are not ready, serve on."""

    now: bool


class TakeAccess(msgspec.Struct, frozen=True, tag=True):
    """Read the token and the certificate again, and ask for these from now on."""


class LoadAnswer(msgspec.Struct, frozen=True, tag=True):
    number: int
    error: str | None


# --- From a front ------------------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, tag=True):
    """A front takes requests; its ports."""

    http_port: int
    grpc_port: int


class Settled(msgspec.Struct, frozen=True, tag=True):
    number: int


class LoadAsked(msgspec.Struct, frozen=True, tag=True):
    number: int
    name: str
    load: bool  # or unload


ToDevice = Attach | Detach | AttachSlots | AttachRings | AttachCounters | Deploy | Retire | Stop
FromDevice = Deployed | NotDeployed | Detached | Retired | Said
ToFront = (
    Welcome
    | Offer
    | AttachSlots
    | AttachRings
    | Retired
    | DeviceUp
    | DeviceDown
    | Leave
    | TakeAccess
    | LoadAnswer
)
FromFront = Listening | Settled | LoadAsked | Said
Message = ToDevice | FromDevice | ToFront | FromFront

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Channel(Closing):
    """One end of a socket pair. No call blocks: a process that does not read counts as dead."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Our end, and the one that a child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """False: the other end is closed."""
        try:
            socket.send_fds(self.socket, [_ENCODER.encode(message)], list(descriptors))
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message with its descriptors; None: nothing is there yet. Raises EOFError."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, _PACKET, _DESCRIPTORS)
        except BlockingIOError:
            return None
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return _DECODER.decode(data), descriptors

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()
