"""A service's account in the driving loop: charged by the thread that ends a request.

core/credit.py has the account. Replicas of one service share one, so their threads take turns.
"""

from __future__ import annotations

import numpy as np

from eclip.core.credit import NO_VERDICT, charge, end_period
from eclip.core.requests import END, HAS_EXPIRED, OUTCOME, START, WITH_RESULT
from eclip.core.rules import ACCOUNT, BUSY_SINCE, GAIN, IDLE, LOCK, Ints
from eclip.jit import inlined, swap_word


@inlined
def _lock(board: Ints, account: int) -> None:
    """Threads hold it for a tenth of a microsecond, and call nothing meanwhile."""
    at = np.uint64(board[account, LOCK:].ctypes.data)
    while swap_word(at, 1):
        pass


@inlined
def _unlock(board: Ints, account: int) -> None:
    swap_word(np.uint64(board[account, LOCK:].ctypes.data), 0)


@inlined
def settle(
    board: Ints,
    row: int,
    peers: Ints,
    request: Ints,
    due: int,
    could_begin: int,
    waits: bool,
) -> int:
    """A request of the service has ended, which was ``due`` then; its verdict. ``could_begin``:
    when it had come and the one before it had ended. Unless one ``waits``, here or elsewhere,
    the busy period ends.
    """
    if board[row, GAIN] == 0:
        return NO_VERDICT
    account = board[row, ACCOUNT]
    verdict = NO_VERDICT
    end = request[END]
    late = end > due or request[OUTCOME] == HAS_EXPIRED
    by_host = late and end - max(request[START] - could_begin, 0) <= due
    _lock(board, account)
    if late or request[OUTCOME] == WITH_RESULT:
        verdict = charge(board, row, late, by_host, end)
    if not waits:
        board[row, BUSY_SINCE] = IDLE
        others = 0
        for peer in range(peers.shape[0]):
            other = peers[peer]
            if board[other, GAIN] != 0 and board[other, ACCOUNT] == account:
                others += board[other, BUSY_SINCE] != IDLE
        if others == 0:
            end_period(board, row, end)
    _unlock(board, account)
    return verdict
