"""Ctrl-C, SIGTERM and SIGHUP end a command alike: through every `finally`, so that no
file of ours stays behind.

A mount that hangs may hold up that way for good, with the main thread inside the kernel, where no
handler runs. So a second thread looks for the signal too: the interpreter's own handler writes its
number to a descriptor where another thread took it, and it stays pending where the kernel gave it to a
thread that does not come back. The second thread says the one line if the main one does not, and ends
the process when its time is over.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nobounce.cli import early

SIGNALS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Each with the handler that is replaced; another one, or the SIG_IGN of nohup, stays."""
GRACE_SECONDS = 5.0
"""So long the tidying up may take: no second signal ends it before, and nothing goes on after."""
_MOMENT = 0.002
TOLD_SECONDS = 0.25
"""When the one line is said at the latest."""


class Ended(KeyboardInterrupt):
    """Raised where a signal asked us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def by_ctrl_c(asked: KeyboardInterrupt) -> bool:
    """Whether it was the person in front of the terminal."""
    return not isinstance(asked, Ended) or asked.number == signal.SIGINT


def words(asked: KeyboardInterrupt) -> str:
    """What ended a command, for its one line."""
    return "interrupted" if by_ctrl_c(asked) else f"ended by {signal.Signals(code(asked) - 128).name}"


def code(asked: KeyboardInterrupt) -> int:
    """The exit code: 128 and the signal's number, as a shell tells it."""
    return 128 + (asked.number if isinstance(asked, Ended) else signal.SIGINT)


class _Watch:
    """A thread that sees to it that a command which was asked to end says so, and ends."""

    def __init__(self) -> None:
        self.title = "nobounce"
        self.first: float | None = None
        """When the command was asked to end."""
        self.asked: Ended | None = None
        """What it was asked by; it may have come out as another error, or been lost."""
        self.answered = 0
        """Signals that were no request to end after all."""
        self._told = threading.Lock()
        self._read_fd = self._write_fd = -1

    def begin(self, title: str) -> None:
        self.title, self._told = title, threading.Lock()

    def end(self, number: int, _: object) -> None:
        """The handler of the signals."""
        if self.first is None:
            self.first = time.monotonic()
            self.asked = Ended(number)
            raise self.asked
        if time.monotonic() - self.first > GRACE_SECONDS + 1:  # there was no thread left for a watch
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def start(self) -> None:
        """Without a descriptor or a thread left for it, ending takes as long as it takes."""
        with suppress(OSError, RuntimeError, MemoryError):
            self._read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._write_fd, False)
            threading.Thread(target=self._run, name="nobounce-ending", daemon=True).start()
            signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def stop(self) -> None:
        """The block has ended; a process that was asked to end is still watched until it has."""
        if self._write_fd >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._write_fd)

    def tell(self, asked: KeyboardInterrupt) -> None:
        """Say the one line, unless it was said."""
        if self._told.acquire(blocking=False):
            with suppress(OSError, ValueError):  # a closed stderr
                sys.stderr.write(f"{self.title}: {words(asked)}\n")
                sys.stderr.flush()

    def _run(self) -> None:
        signal.pthread_sigmask(
            signal.SIG_BLOCK, SIGNALS
        )  # pending ones are seen by a thread that blocks them
        heard = 0
        while True:
            if select.select([self._read_fd], [], [], TOLD_SECONDS)[0]:
                byte = os.read(self._read_fd, 1)
                if not byte:
                    os.close(self._read_fd)
                    return
                number = byte[0]
                if self.first is None and signal.getsignal(number) != self.end:
                    continue  # passed on to a child, say
                heard += 1
                time.sleep(TOLD_SECONDS)
                if self.answered >= heard:
                    continue
            else:
                number = next(iter(self._pending()), 0)
                time.sleep(TOLD_SECONDS if number else 0)
                if number not in self._pending():
                    continue
            asked = Ended(number)
            self.tell(asked)
            time.sleep(GRACE_SECONDS)
            os._exit(code(asked))

    def _pending(self) -> set[int]:
        return {int(n) for n in signal.sigpending() if signal.getsignal(n) == self.end}


_watch = _Watch()


def begin(verb: str) -> None:
    """From now on the one line names this verb."""
    _watch.begin(f"nobounce {verb}")


def tell(asked: KeyboardInterrupt) -> None:
    """Say in one line what ended the command, once."""
    _watch.tell(asked)


def asked() -> KeyboardInterrupt | None:
    """What the command was asked to end by, and was not answered."""
    return _watch.asked


def settle() -> None:
    """Have the process end with the exit code that it is given.

    `python -m` ends by SIGINT itself where KeyboardInterrupt came out of the last `exec` of a text, caught or
    not: dataclasses and named tuples, made while a module is loaded, are such texts. Running another one
    makes the interpreter forget it.
    """
    exec("")


def resume() -> None:
    """The signal was an answer to something, and the command goes on."""
    _watch.first = _watch.asked = None
    _watch.answered += 1


@contextmanager
def orderly(*, last: bool = False) -> Iterator[None]:
    """Have the signals raise Ended inside, on the main thread; elsewhere nothing changes.

    Behind the `last` block of a process they end it at once and in silence: there is no work left that
    they could keep from its end. A process that was asked to end has GRACE_SECONDS for that, what
    follows the block included.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mine = [number for number, usual in SIGNALS.items() if signal.getsignal(number) in (usual, early.end)]
    watch = _watch = _Watch()
    watch.start()
    before, sys.unraisablehook = sys.unraisablehook, _again(sys.unraisablehook, watch)
    for number in mine:
        signal.signal(number, watch.end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL if last else SIGNALS[number])
        sys.unraisablehook = before
        watch.stop()


def _again(hook: Callable[[Any], object], watch: _Watch) -> Callable[[Any], None]:
    """A hook for exceptions that cannot come out, as in `__del__`: an interrupt among them is raised
    once more, a moment later."""

    def call(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Ended) or watch.asked is None:
            hook(unraisable)
            return
        number = watch.asked.number
        watch.first = watch.asked = None

        def later() -> None:
            time.sleep(_MOMENT)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

        with suppress(RuntimeError, MemoryError):  # no thread: the watch ends the process in a while
            threading.Thread(target=later, name="nobounce-ending", daemon=True).start()
            return
        watch.asked = Ended(number)

    return call
