# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A background thread that prepares the next items while the current one is used."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

JOIN_SECONDS = 5.0
"""How long the end of a program waits for a thread that is in a long read."""


class ReadAhead(Generic[T]):
    """Iterates in a thread, at most ``depth`` items before its user.

    The thread starts at once. It ends with the iterator, with :meth:`close`, when this object is
    no longer referenced, or when the program ends. An exception of the iterator is raised after
    the items before it, and again by every later call.

    Args:
        items: Used by the thread alone until :meth:`close` returns.
        depth: Items that wait for their user at most, >= 1. The thread prepares one more.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._shelf: _Shelf[T] = _Shelf(depth)
        # The thread has no reference to this object, so that it does not keep it alive.
        self._thread = threading.Thread(
            target=_work, args=(items, self._shelf), name="read-ahead", daemon=True
        )
        self._thread.start()
        # Also called at exit: a thread in compiled code must not outlive the interpreter.
        self._finalizer = weakref.finalize(self, _stop, self._shelf, self._thread, JOIN_SECONDS)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._shelf.take()

    def close(self, seconds: float | None = None) -> None:
        """Stop the thread and drop the items that wait.

        Args:
            seconds: How long to wait for the thread; by default until it has ended.
        """
        self._finalizer.detach()
        _stop(self._shelf, self._thread, seconds)


class _Shelf(Generic[T]):
    """The items between the two threads."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._end: BaseException | None = None

    def put(self, item: T) -> bool:
        """Wait for room and put an item there; return False if the shelf is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def finish(self, end: BaseException) -> None:
        """Set the exception that follows the last item."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def take(self) -> T:
        """Wait for an item and return it, or raise what ended the iterator."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._end or self._closed)
            if not self._items:
                raise self._end or StopIteration
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _work(items: Iterator[T], shelf: _Shelf[T]) -> None:
    try:
        for item in items:
            if not shelf.put(item):
                return
        shelf.finish(StopIteration())
    except BaseException as error:  # raised again in the thread of the user
        shelf.finish(error)


def _stop(shelf: _Shelf[T], thread: threading.Thread, seconds: float | None) -> None:
    shelf.close()
    if thread is not threading.current_thread():
        thread.join(seconds)
