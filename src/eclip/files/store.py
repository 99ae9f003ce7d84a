"""Reading and writing artefacts: the only code that touches their files.

A file is one JSON object: format, version, digest of the body, body; gzipped where its name ends
in ``.gz``. Files written by hand, such as the built-in topologies, leave out the digest. A file is
written to a temporary neighbour and renamed, so a crash leaves the old file whole, and it ends on
its closing brace, so a file cut at any byte is refused. ``load`` accepts only files that ``save``
wrote; any fault raises ArtefactError with the file's name and the reason.

A results file holds one such object a line, and comparisons are appended. ``append`` adds a whole
line or nothing, and writers take turns. A line whose writer was killed is skipped with a warning;
the other lines count.

``outputs.py`` checks paths before work begins, and finds another place if writing fails.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import zlib
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from eclip.core.calibration import Calibration
from eclip.core.lengths import Lengths
from eclip.core.plan import Plan
from eclip.core.profile import Profile
from eclip.core.runlog import RunLog
from eclip.core.topology import Topology
from eclip.core.trace import Trace
from eclip.errors import ArtefactError, UsageError, unknown_name
from eclip.files.comparison import Comparison
from eclip.files.encoding import (
    MOST_EXACT,
    beyond_exact,
    decode_mask,
    encode_json,
    encode_mask,
    encode_text,
)
from eclip.files.machine import Machine
from eclip.files.observations import Observations
from eclip.files.writing import check_name, exists, folder_of, write_atomically

Artefact = (
    Topology
    | Trace
    | Profile
    | Calibration
    | Observations
    | Plan
    | RunLog
    | Lengths
    | Machine
    | Comparison
)
A = TypeVar(
    "A",
    Topology,
    Trace,
    Profile,
    Calibration,
    Observations,
    Plan,
    RunLog,
    Lengths,
    Machine,
    Comparison,
)

# A change that older readers would misread raises the version here.
_KINDS: dict[str, tuple[type[Artefact], int]] = {
    "topology": (Topology, 2),
    "trace": (Trace, 2),
    "profile": (Profile, 2),
    "calibration": (Calibration, 4),
    "observations": (Observations, 1),
    "plan": (Plan, 2),
    "run": (RunLog, 2),
    "lengths": (Lengths, 1),
    "machine": (Machine, 1),
    "comparison": (Comparison, 2),
}
_COMPARISON = b'{"format":"eclip/comparison"'  # how a line of a results file begins
# How a file of each kind is made anew.
_MADE_BY = {
    "topology": "by hand, with the fields of `eclip topology h200 --json`",
    "trace": "eclip profile MODEL:BATCH -o FOLDER, whose profiles hold it",
    "profile": "eclip profile MODEL:BATCH -o FOLDER, or eclip record for a program",
    "calibration": "eclip calibrate -o FILE",
    "observations": "eclip calibrate --observations FILE",
    "plan": "eclip plan MIX -o FILE",
    "run": "eclip run PLAN -o FILE",
    "lengths": "eclip varout estimate LENGTHS -o FILE",
    "machine": "eclip varout measure -o FILE",
    "comparison": "eclip compare MIX --results FILE",
}
# Kinds of which some ship with the package, and where in its data.
_BUILTIN_FOLDERS: dict[type[Artefact], str] = {
    Topology: "topologies",
    Calibration: "calibrations",
    Observations: "observations",
    Machine: "machines",
}
# Far above any real artefact; keeps a wrong file (or a gzip bomb) from filling the memory.
MAX_BYTES = 512 * 1024 * 1024


class Results(NamedTuple):
    """A results file: its comparisons in the order of their lines, and a line of words for every
    line that could not be read."""

    comparisons: list[Comparison]
    warnings: list[str]


class _Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    digest: str | None = None
    body: msgspec.Raw


def save(artefact: Artefact, path: str | Path) -> None:
    """Write an artefact to a file, all of it or nothing.

    A file that is not an artefact of the same kind is never replaced. A name that ends in ``.gz``
    is compressed::

        eclip.save(plan, "plan.json")
    """
    if not any(isinstance(artefact, cls) for cls, _ in _KINDS.values()):
        raise UsageError(f"save takes an artefact and a file name, not a {type(artefact).__name__}")
    path = Path(path)
    check_replaceable(path, type(artefact))
    data = _encode(artefact)
    if len(data) > MAX_BYTES:
        raise ArtefactError(
            f"{path} would be larger than {MAX_BYTES >> 20} MiB, which is not read again; "
            f"run or trace less"
        )
    _decode(data, str(path))  # a float where an int belongs must not wait for the next reader
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    write_atomically(path, data)


def make_folder(path: str | Path) -> Path:
    """A folder to write into, made if it is missing."""
    place = Path(path)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot use the folder {place}: {error.strerror or error}") from None
    return place


def append(comparison: Comparison, path: Path) -> None:
    """Add a line to a results file, made if it is missing, even beside others that do."""
    line = _encode(comparison) + b"\n"
    _decode(line, str(path))
    try:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            if file.read(1) not in (b"", b"\n"):  # the last writer was killed mid-line
                line = b"\n" + line
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(size)
                raise
    except OSError as error:
        raise ArtefactError(f"cannot write {path}: {error.strerror or error}") from None


def load_results(path: Path) -> Results:
    """The comparisons of a results file. Lines that cannot be read are passed over, each with a
    warning; a file that has no line of ours is refused.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # a writer may be in the middle of a line
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise ArtefactError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no results file")
    results = Results([], [])
    ours = False
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line:
            continue
        try:
            comparison = _decode(line, f"{path} line {number}")
            if not isinstance(comparison, Comparison):
                raise ArtefactError(f"{path} line {number} holds no comparison")
        except ArtefactError as error:
            ours = ours or line.startswith(_COMPARISON) or _COMPARISON.startswith(line)
            results.warnings.append(f"{error}; the line is left out, the others are used")
        else:
            results.comparisons.append(comparison)
    if results.warnings and not results.comparisons and not ours:
        why = results.warnings[0].partition(";")[0]
        raise ArtefactError(f"{why}, so this is no results file; choose another name")
    return results


def holds_results(path: Path) -> bool:
    """Does the file begin as a results file does?"""
    try:
        with path.open("rb") as file:
            return file.read(len(_COMPARISON)) == _COMPARISON
    except OSError:
        return False


def check_results(path: Path) -> list[str]:
    """Refuse a file that results could not be added to, before they have been measured.

    What is wrong with single lines of it are warnings.
    """
    check_name(path, "file")
    warnings = []
    if exists(path):
        warnings = load_results(path).warnings
    folder = folder_of(path)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArtefactError(f"cannot write {path}: permission denied")
    return warnings


@overload
def load(path: str | Path) -> Artefact: ...


@overload
def load(path: str | Path, kind: type[A]) -> A: ...


def load(path: str | Path, kind: type[A] | None = None) -> A | Artefact:
    """The artefact in a file.

    Damaged files, and artefacts of another ``kind``, are refused::

        plan = eclip.load("plan.json")
        plan = eclip.load("plan.json", eclip.Plan)  # refused if the file holds no plan
    """
    if not isinstance(path, str | Path) or not (kind is None or isinstance(kind, type)):
        raise UsageError("load takes a file name and then, if at all, a kind such as eclip.Plan")
    artefact = _load_any(Path(path))
    if kind is not None and not isinstance(artefact, kind):
        raise ArtefactError(
            f"{path} holds {_a(_kind_of(type(artefact)))}, but {_a(_kind_of(kind))} is needed here"
        )
    return artefact


def _load_any(path: Path) -> Artefact:
    try:
        data = read_bytes(path)
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror or error}") from None
    return _decode(data, str(path))


def load_builtin(name: str, kind: type[A]) -> A:
    """A topology, calibration, machine or observations that ship with the package.

    A name that is not there is refused with those that are::

        h200 = eclip.load_builtin("h200", eclip.Topology)
    """
    if not isinstance(name, str) or kind not in _BUILTIN_FOLDERS:
        kinds = ", ".join(f"eclip.{cls.__name__}" for cls in _BUILTIN_FOLDERS)
        raise UsageError(f"load_builtin takes a name and then a kind, one of {kinds}")
    files = _builtin_files(kind)
    if name not in files:
        raise unknown_name(_kind_of(kind), name, builtin_names(kind))
    artefact = _decode(read_bytes(files[name]), name)
    if not isinstance(artefact, kind):
        raise ArtefactError(f"the built-in {name} is not {_a(_kind_of(kind))}; reinstall eclip")
    return artefact


def builtin_names(kind: type[A]) -> tuple[str, ...]:
    return tuple(sorted(_builtin_files(kind)))


def kind_at(path: Path) -> str | None:
    """Which kind of artefact a file claims to be, or None; other damage does not matter."""
    try:
        format_name = _open_envelope(read_bytes(path), str(path)).format
    except (ArtefactError, OSError):
        return None
    return format_name.removeprefix("eclip/")


def to_data(artefact: Artefact) -> Any:
    """The artefact as plain data, as it stands in its file."""
    return msgspec.to_builtins(artefact, enc_hook=encode_mask)


def save_export(path: Path, data: str | bytes, mark: bytes) -> None:
    """Write a report or trace atomically; only a file that carries the same mark is replaced."""
    check_replaceable(path, mark)
    write_atomically(path, encode_text(data) if isinstance(data, str) else data)


def check_replaceable(path: Path, what: type[Artefact] | bytes) -> None:
    """Refuse to replace anything but an artefact of this kind, or an export with this mark."""
    if not exists(path):
        return
    if path.is_dir():
        raise ArtefactError(f"{path} is a folder; give the name of a file")
    if isinstance(what, bytes):
        try:
            ours = what in read_bytes(path)
        except (ArtefactError, OSError):
            ours = False
        if not ours:
            raise ArtefactError(
                f"{path} exists and is not a file of this kind, so it will not be replaced; "
                f"choose another name or remove it first"
            )
    elif (found := kind_at(path)) != (kind := _kind_of(what)):
        raise ArtefactError(
            f"{path} exists and is {found or 'no eclip file'}, so {_a(kind)} will not replace it; "
            f"choose another name or remove it first"
        )


def read_bytes(path: Path) -> bytes:
    """The contents of a file, unpacked if it is gzipped."""
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if data[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(wbits=31)
        try:
            data = unpacker.decompress(data, MAX_BYTES + 1)
        except zlib.error as error:
            raise ArtefactError(f"{path} is damaged: {error}") from None
        if len(data) <= MAX_BYTES and (not unpacker.eof or unpacker.unused_data):
            raise ArtefactError(
                f"{path} is damaged: its compressed data is cut short or has a tail"
            )
    if len(data) > MAX_BYTES:
        raise ArtefactError(f"{path} is larger than {MAX_BYTES >> 20} MiB: not an eclip file")
    return data


def _open_envelope(data: bytes, where: str) -> _Envelope:
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"{where} is not an eclip file, or is damaged: {error}") from None
    if not envelope.format.startswith("eclip/"):
        raise ArtefactError(f"{where} is not an eclip file: its format is {envelope.format!r}")
    return envelope


def _encode(artefact: Artefact) -> bytes:
    body = encode_json(artefact)
    kind = _kind_of(type(artefact))
    envelope = _Envelope(
        format=f"eclip/{kind}",
        version=_KINDS[kind][1],
        digest=_digest(body),
        body=msgspec.Raw(body),
    )
    return msgspec.json.encode(envelope)


def _decode(data: bytes, where: str) -> Artefact:
    envelope = _open_envelope(data, where)
    kind = envelope.format.removeprefix("eclip/")
    if kind not in _KINDS:
        raise ArtefactError(
            f"{where} holds a {kind!r}, which this eclip does not know; update eclip"
        )
    cls, version = _KINDS[kind]
    if envelope.version != version:
        newer = envelope.version > version
        raise ArtefactError(
            f"{where} is {_a(kind)} of version {envelope.version}, this eclip reads {version}; "
            + ("update eclip" if newer else f"make the file again: {_MADE_BY[kind]}")
        )
    body = bytes(envelope.body)
    if envelope.digest is not None and _digest(body) != envelope.digest:
        raise ArtefactError(
            f"{where} is damaged or was edited: its digest does not match "
            f"(after an edit you meant, remove the digest)"
        )
    if (number := beyond_exact(body)) is not None:
        raise ArtefactError(
            f"{where} is not {_a(kind, 'valid ')}: it holds {str(number)[:20]}, "
            f"and a whole number is at most {MOST_EXACT}"
        )
    try:
        artefact: Artefact = msgspec.json.decode(body, type=cls, dec_hook=decode_mask)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArtefactError(f"{where} is not {_a(kind, 'valid ')}: {error}") from None
    return artefact


def _digest(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


def _kind_of(cls: type[Artefact]) -> str:
    return next(kind for kind, (known, _) in _KINDS.items() if known is cls)


def _a(kind: str, adjective: str = "") -> str:
    article = "" if kind == "observations" else "a "
    return f"{article}{adjective}{kind}"


def _builtin_files(cls: type[Artefact]) -> dict[str, Path]:
    """The built-in files of this kind, by name."""
    folder = Path(str(resources.files("eclip") / "data" / _BUILTIN_FOLDERS[cls]))
    return {path.name.partition(".")[0]: path for path in folder.iterdir()}
