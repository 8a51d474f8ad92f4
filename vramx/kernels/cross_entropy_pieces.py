"""How the programs that share a row of logits tell each other what they found in their pieces.

Each of P programs sends each of them a message, of 8 bytes that no message leaves zero: receivers
wait until theirs are there. So one trip through the L2 cache is all, where a counter of arrivals
would take three. A receiver adds up in the order of the pieces, and so to the same last bit as the
others and in every run, and empties its boxes: mail that was zero before a kernel is zero after.

That a program waits is safe because the programs of a row are P numbers in turn: a device starts
programs by their number, as fast as there is room. (No document promises it; the scans of CUB,
agent_scan.cuh of NVIDIA's CCCL, rest on it likewise.) So at most one row of a kernel has programs
that have not started, all rows before it finish, and make room for P programs; the launcher sees to
it that a device has room for P, and for those of kernels on other streams.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """Return exp(x), 0 where that is a denormal number: 2 instructions, and 5 for those."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def base_of(top):
    """Return what to subtract of logits: nothing where none was finite, for -inf - -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def combine(tops, sums):
    """Return the maximum, and the sum of sums each of which is of exp(x - base_of(its top))."""
    top = tl.max(tops, 0)
    return top, tl.sum(sums * exp(tops - base_of(top)), 0)


@triton.jit
def send(
    mail_ptr, piece, found, PIECES: tl.constexpr, THREADS: tl.constexpr, SMOOTHED: tl.constexpr
):
    """Send all pieces what is found in this: maximum, sum and, if SMOOTHED, the sum of its logits.

    mail_ptr: int64 [1 or, if SMOOTHED, 2; PIECES receivers; PIECES senders], of the row.
    """
    receiver = tl.arange(0, THREADS)
    receives = receiver < PIECES
    boxes = mail_ptr + receiver * PIECES + piece
    # Never zero: a maximum of 0 has a sum of at least 1.
    message = (_bits(found[0]) << 32) | (_bits(found[1]) & 0xFFFFFFFF)
    tl.atomic_xchg(boxes, message + receiver * 0, mask=receives, sem="relaxed")
    if SMOOTHED:
        message = (_bits(found[2]) & 0xFFFFFFFF) | (1 << 32)
        tl.atomic_xchg(
            boxes + PIECES * PIECES, message + receiver * 0, mask=receives, sem="relaxed"
        )


@triton.jit
def receive(mail_ptr, piece, PIECES: tl.constexpr, THREADS: tl.constexpr, SMOOTHED: tl.constexpr):
    """Wait for the messages of all pieces to this one and return what send() was given, of all."""
    sender = tl.arange(0, THREADS)
    boxes = mail_ptr + piece * PIECES + sender
    messages = _wait(boxes, sender < PIECES)
    tops = tl.where(sender < PIECES, _float_of(messages >> 32), float("-inf"))
    sums = tl.where(sender < PIECES, _float_of(messages), 0.0)
    top, sums = combine(tops, sums)
    total = 0.0
    if SMOOTHED:
        messages = _wait(boxes + PIECES * PIECES, sender < PIECES)
        total = tl.sum(tl.where(sender < PIECES, _float_of(messages), 0.0), 0)
    return top, sums, total


@triton.jit
def _wait(boxes, mask):
    """Return the messages when all are there, and empty their boxes.

    One box a thread, of as many as there are: more threads would read at other times, and not see
    the same. Volatile loads ask the L2 cache each time.
    """
    messages = tl.load(boxes, mask=mask, other=1, volatile=True)
    while tl.min((messages != 0).to(tl.int32), 0) == 0:
        messages = tl.load(boxes, mask=mask, other=1, volatile=True)
    tl.store(boxes, messages * 0, mask=mask)
    return messages


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def _float_of(message):
    return message.to(tl.int32).to(tl.float32, bitcast=True)
