"""Doors as a compiled loop reads them: rings of requests that other processes may fill.

core/requests.py has the words. A door may be shut at any time: its memory stays until the loop has
seen that, between two requests, and until no loop looks at the rings of others.
"""

from __future__ import annotations

from eclip.core.credit import expect
from eclip.core.requests import (
    ADDRESS,
    ANSWERED,
    ARRIVAL,
    BUSY_NS,
    DEPTH,
    DOOR_ROWS,
    DOOR_WORDS,
    DUE,
    FIRST_ROW,
    NO_DESCRIPTOR,
    PROGRAM,
    REQUEST_WORDS,
    SEEN,
    SUBMITTED,
    WAKEUP,
)
from eclip.core.rules import BUSY_SINCE, DEADLINE, IDLE, LEFT, SERVICE, TIER, Ints
from eclip.jit import fetch_add, inlined, load_acquire, store_release, words_at


@inlined
def since_of(request: Ints, bound_ns: int) -> int:
    """From when its worker's bound counts."""
    return int(request[DUE] - bound_ns if request[DUE] else request[ARRIVAL])


@inlined
def place_of(doors: Ints, group: int, door: int, word: int) -> int:
    """The address of a door's word."""
    number = group * doors.shape[1] + door
    return int(doors.ctypes.data + 8 * (number * DOOR_WORDS + word))


@inlined
def row_at(ring: int, rows: int, number: int) -> Ints:
    at = ring + 8 * (FIRST_ROW + number % rows * REQUEST_WORDS)
    return words_at(at, REQUEST_WORDS)  # type: ignore[no-any-return]


@inlined
def first_open(doors: Ints, me: int, door: int) -> int:
    """The address of the request whose turn it is there, or 0. From here on the loop uses the ring
    until it comes again."""
    ring = load_acquire(place_of(doors, me, door, ADDRESS))
    if doors[me, door, SEEN] != ring:
        store_release(place_of(doors, me, door, SEEN), ring)
    if ring == 0:
        return 0
    answered = load_acquire(ring + 8 * ANSWERED)
    if load_acquire(ring + 8 * SUBMITTED) <= answered:
        return 0
    row = answered % doors[me, door, DOOR_ROWS]
    return int(ring + 8 * (FIRST_ROW + row * REQUEST_WORDS))


@inlined
def raise_answered(doors: Ints, me: int, door: int) -> int:
    """The first open request of the ring has ended; the descriptor to ring, or none."""
    ring = doors[me, door, ADDRESS]
    if ring == 0:  # shut meanwhile
        return NO_DESCRIPTOR
    store_release(ring + 8 * ANSWERED, load_acquire(ring + 8 * ANSWERED) + 1)
    return int(doors[me, door, WAKEUP])


@inlined
def look_behind(doors: Ints, me: int, count: int, first: int, bound_ns: int, dues: Ints) -> int:
    """From when the bounds of other open requests count, as many as are looked at; those that wait
    where the one whose turn it is did (``first``) come before those of other doors."""
    found = 0
    for step in range(count):
        door = (first + step) % count
        ring = doors[me, door, ADDRESS]
        if ring == 0:
            continue
        submitted = load_acquire(ring + 8 * SUBMITTED)
        for number in range(load_acquire(ring + 8 * ANSWERED) + (step == 0), submitted):
            if found == dues.shape[0]:
                return found
            dues[found] = since_of(row_at(ring, doors[me, door, DOOR_ROWS], number), bound_ns)
            found += 1
    return found


@inlined
def raise_waiting(board: Ints, doors: Ints, count: int, me: int, places: Ints, mark: int) -> None:
    """Make services busy for which a request waits that their loops have not seen yet, and tell
    from when on those behind it cannot be in time."""
    fetch_add(mark, 1)  # before their doors are read: one that is shut may go when we look no more
    for group in range(doors.shape[0]):
        for door in range(count):
            ring = load_acquire(place_of(doors, group, door, ADDRESS))
            if group == me or ring == 0:
                continue
            submitted = load_acquire(ring + 8 * SUBMITTED)
            answered = load_acquire(ring + 8 * ANSWERED)
            if submitted <= answered:
                continue
            request = row_at(ring, doors[group, door, DOOR_ROWS], answered)
            program = request[PROGRAM]
            if not 0 <= program < places.shape[1]:
                continue
            row, bound_ns = places[group, program, 0], places[group, program, 1]
            if board[row, TIER] != SERVICE:
                continue
            request_ns = places[group, program, 2]
            for number in range(answered, submitted):
                other = row_at(ring, doors[group, door, DOOR_ROWS], number)
                due = since_of(other, bound_ns) + bound_ns
                expect(board, row, due, (number - answered) * request_ns, other[ARRIVAL])
            if board[row, BUSY_SINCE] != IDLE:
                continue
            board[row, DEADLINE] = since_of(request, bound_ns) + bound_ns
            board[row, LEFT] = request_ns
            board[row, BUSY_SINCE] = request[ARRIVAL]
            if load_acquire(ring + 8 * ANSWERED) != answered:  # it has ended meanwhile
                board[row, BUSY_SINCE] = IDLE
    fetch_add(mark, -1)


@inlined
def waits_behind(doors: Ints, me: int, count: int, first: int, now: int) -> bool:
    """Whether another request has come than the one that runs, from the door ``first``."""
    for door in range(count):
        ring = doors[me, door, ADDRESS]
        if ring == 0:
            continue
        number = load_acquire(ring + 8 * ANSWERED) + (door == first)
        if load_acquire(ring + 8 * SUBMITTED) <= number:
            continue
        if row_at(ring, doors[me, door, DOOR_ROWS], number)[ARRIVAL] <= now:
            return True
    return False


@inlined
def count_busy(accounts: Ints, account: int, change: int, now: int) -> None:
    """One of the account's loops is busy from now on (1), or is so no more (-1)."""
    first = accounts.ctypes.data
    for number in (0, account):
        at = first + 8 * number * accounts.shape[1]
        if fetch_add(at + 8 * DEPTH, change) == (change < 0):
            fetch_add(at + 8 * BUSY_NS, -change * now)
