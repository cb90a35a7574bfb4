"""The longest context that a machine takes."""

from __future__ import annotations

import bisect

from offload import HostOutOfMemory

from .memory import HOST_SHARE, rooms
from .placement import page_grad_dtype, working_total
from .probe import learned_positions
from .question import MOST_CHUNKS, Cut, Question
from .storage import Asked, Stored, divide


def longest_context(question: Question) -> int:
    """Tokens whose past fits, in chunks as a context of that length would have them; the last chunk is nobody's."""
    most = min(MOST_CHUNKS * question.chunk_tokens(1 << 62), learned_positions(question.parts.decoder))
    return bisect.bisect_left(range(1, most + 1), True, key=lambda tokens: not _fits(question, tokens))


def _fits(question: Question, tokens: int) -> bool:
    """Whether the past of so many does, beside what a step takes; what may be kept besides gives way."""
    q, machine = question, question.left
    c, layers = q.config, q.profile.layers
    chunk = q.chunk_tokens(tokens)
    working = working_total(c, q.parts, q.profile, tokens, chunk, q.batch, True, gpu=q.on_gpu)
    room = rooms(c, machine, working=working, page_bytes=1 << 60)
    free = 1 << 62 if machine.host_free is None else machine.host_free
    near, far = room.device_pages, room.host  # set by hand they may be more than there is
    if q.on_gpu:
        left = machine.room() - working
        far = min(far, free)
    else:  # pages are where all is
        left = int(HOST_SHARE * free) - working
        near = left if near is None else min(near, left)
        far = min(far, left - near)
    if left < 0:
        return False
    bounds = Cut(tokens, chunk)
    stored = {w: Stored.count(w, bounds, c.page_tokens) for w in {f.window for f in layers.values()}}
    asked = Asked.of(layers, stored, c.page_tokens, q.batch, page_grad_dtype(c, q.profile))
    try:
        divide(asked, device_budget=left if near is None else min(near, left), host_budget=max(far, 0))
    except HostOutOfMemory:
        return False
    return True
