"""Ends the ranks that no launcher watches when one of them dies before the process group exists.

Each rank keeps a connection to rank 0, from before torch is imported until the group is made. The kernel closes it with
the process, however that ends, and rank 0 passes the name of the lost rank on: torch's own store opens later, and ranks
wait in it for hours. Where rank 0 cannot be reached at this port, nobody is watched. Imports no torch.
"""

import json
import os
import platform
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from zlib import crc32

from finetune.errors import FinetuneError, LostContact, UserError
from finetune.runtime.processes import ELASTIC_VARIABLE, exit_process
from finetune.runtime.text.terminal import printable

_FIRST_PORT, _NUM_PORTS = 15000, 17000  # below the ephemeral ports of Linux
_TICK_SECONDS = 0.1
_CONNECT_SECONDS = 1.0
_GRACE_SECONDS = 2.0  # for this rank to join or to fail by itself: all may have the same error
_FAILURE_SECONDS = 5.0  # for the others to connect to a rank that has failed at once
_MAX_CHARACTERS = 2000
_MAX_BYTES = 1 << 16
_HELLO, _JOINED, _FAILED = "hello", "joined", "failed"


def exit_after_loss(error: FinetuneError) -> None:
    """Print the error and exit this process from any thread."""
    rank = os.environ.get("RANK", "0")
    print(printable(f"{'' if rank == '0' else f'[rank {rank}] '}error: {error}"), file=sys.stderr, flush=True)
    exit_process(error.exit_code)


class StartWatch:
    """The connections of one rank until `end`; `on_lost` gets the error for the first other rank that dies."""

    def __init__(self, *, rank: int, world: int, address: str, port: int) -> None:
        self.on_lost: Callable[[FinetuneError], None] = exit_after_loss
        self._me = f"rank {rank} (process {os.getpid()} on {platform.node()})"
        self._launch = f"finetune {port} {world}"
        self._num_others = world - 1 if rank == 0 else 1
        self._address = (address, _FIRST_PORT + crc32(str(port).encode()) % _NUM_PORTS)
        self._is_rank_0 = rank == 0
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[socket.socket, str] = {}  # that have said hello
        self._lost: tuple[float, FinetuneError] | None = None
        self._last: list[str | int] = []
        self._connects_at = 0.0
        self._thread = threading.Thread(target=self._run, name="start watch", daemon=True)
        self._thread.start()

    def end(self, failure: BaseException | None = None) -> None:
        """Stop watching: the group is made, or this process ends, and the others are notified of a failure."""
        self._last = [_JOINED]
        if failure is not None:
            ours = (
                failure if isinstance(failure, FinetuneError) else LostContact(f"{type(failure).__name__}: {failure}")
            )
            self._last = [_FAILED, f"{self._me} failed: {str(ours)[:_MAX_CHARACTERS]}", ours.exit_code]
        self._thread.join(_FAILURE_SECONDS + _CONNECT_SECONDS)

    def _run(self) -> None:
        with suppress(OSError), self._selector:  # the port is in use: nobody is watched
            if self._is_rank_0:
                host = self._address[0] if self._address[0] in ("127.0.0.1", "localhost") else ""
                listener = socket.create_server((host, self._address[1]), backlog=1024)
                self._selector.register(listener, selectors.EVENT_READ)
            try:
                self._watch()
            finally:
                for key in list(self._selector.get_map().values()):
                    key.fileobj.close()  # type: ignore[union-attr]  # a socket

    def _watch(self) -> None:
        notified: set[socket.socket] = set()
        ends_at = None
        while True:
            last = self._last
            self._receive()
            now = time.monotonic()
            if last:
                ends_at = ends_at or now + (_FAILURE_SECONDS if last[0] == _FAILED else 0.0)
                for connection in self._ranks.keys() - notified:
                    notified.add(connection)
                    _send(connection, last)
                if len(notified) >= self._num_others or now >= ends_at:
                    return
            elif self._lost is not None and now >= self._lost[0]:
                for connection in self._ranks:
                    _send(connection, [_FAILED, str(self._lost[1]), self._lost[1].exit_code])
                self.on_lost(self._lost[1])
                return

    def _receive(self) -> None:
        if not self._is_rank_0 and not self._selector.get_map() and time.monotonic() >= self._connects_at:
            self._connects_at = time.monotonic() + _CONNECT_SECONDS
            with suppress(OSError):
                self._greet(socket.create_connection(self._address, timeout=_CONNECT_SECONDS))
        for key, _ in self._selector.select(_TICK_SECONDS):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if key.data is None:
                with suppress(OSError):
                    self._greet(connection.accept()[0])
                continue
            try:
                received = connection.recv(_MAX_BYTES)
            except OSError:
                received = b""
            *lines, rest = (key.data + received).split(b"\n")
            if received and all(self._read(connection, line) for line in lines) and len(rest) < _MAX_BYTES:
                self._selector.modify(connection, selectors.EVENT_READ, rest)
            else:
                self._close(connection)

    def _greet(self, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.register(connection, selectors.EVENT_READ, b"")
        _send(connection, [_HELLO, self._launch, self._me])

    def _read(self, connection: socket.socket, line: bytes) -> bool:
        """Return whether the connection goes on after this line; anything else is not from a rank of this launch."""
        try:
            word, *texts = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return False
        if word == _HELLO and len(texts) == 2 and texts[0] == self._launch:
            self._ranks[connection] = str(texts[1])
            return True
        if word == _FAILED and connection in self._ranks and len(texts) == 2:
            text, code = texts  # all ranks exit like the first: a user's mistake is no reason for a restart
            self._lose(UserError(text) if code == UserError.exit_code else LostContact(text))
        self._ranks.pop(connection, None)
        return False

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        if (name := self._ranks.pop(connection, None)) is not None:
            reason = "see its own output; without a reason there, it was killed or out of memory"
            self._lose(LostContact(f"lost contact with {name} before the ranks were connected: {reason}."))

    def _lose(self, error: FinetuneError) -> None:
        self._lost = self._lost or (time.monotonic() + _GRACE_SECONDS, error)


def _send(connection: socket.socket, line: Sequence[str | int]) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(line).encode() + b"\n")


_watch: StartWatch | None = None


@contextmanager
def watched_start(variables: Mapping[str, str]) -> Iterator[None]:
    """Watch the other ranks of this launch until `end_start_watch`, unless a launcher does; notify them of an error."""
    global _watch
    if ELASTIC_VARIABLE not in variables:
        rank, world, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        _watch = StartWatch(rank=rank, world=world, address=variables["MASTER_ADDR"], port=port)
    try:
        yield
    except BaseException as error:
        end_start_watch(error)
        raise
    finally:
        end_start_watch()


def report_losses(on_lost: Callable[[FinetuneError], None]) -> None:
    """Have this function end the process from now on."""
    if _watch is not None:
        _watch.on_lost = on_lost


def end_start_watch(failure: BaseException | None = None) -> None:
    """Stop watching: the process group is made, or this rank ends; with its error, if it has failed."""
    global _watch
    if _watch is not None:
        watch, _watch = _watch, None
        watch.end(failure)
