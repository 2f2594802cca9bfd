"""What strangers, tenants and workers who mean harm do to a master's ports, each as one short act.

In: a master's addresses, keys, dice. Out: connections made, bytes sent. Never: a wait for longer than a second, more
than `MOST_HELD` connections held open, or more than `HELD_BYTES` of unfinished messages on them.
"""

from __future__ import annotations

import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import zmq

from joynexus.keyring import Keyring
from joynexus.keys import WORKER_ROLES, ClusterFile, KeyPair
from joynexus.transport import Socket, dial
from joynexus.wire import Buffer, Message, encode, limits
from joynexus.wire.back import Beat, Register
from joynexus.wire.front import BlobBegin, BlobChunk, CreatePolicy, Ping
from joynexus.wire.messages import KINDS
from tests.fuzz.decoder import CORPUS
from tests.fuzz.mutation import Mutator, unpack
from tests.process.test_master import SPEC
from tests.wire.test_decoder import BOMBS, head

MOST_HELD = 60
HELD_BYTES = 16 << 20
TENANT = "evil"


@dataclass
class Line:
    """A connection that passed the handshake, or will."""

    who: str
    bulk: bool
    socket: Socket
    left: int  # messages until it hangs up


@dataclass
class Attacker:
    """Somebody with some keys and no manners.

    Attributes:
        sent: the last messages, with who sent them: what a finding is done again with.
        acts: how often each act was done.
    """

    keyring: Keyring
    chance: random.Random
    sent: deque[tuple[float, str, bool, list[bytes]]] = field(default_factory=lambda: deque(maxlen=400))
    acts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._files: dict[str, ClusterFile] = {}
        for name in ("fuzz-all", "fuzz-act"):
            file = self.keyring.issue(name, tenant=TENANT, scope="act" if name == "fuzz-act" else "all")
            self._files[name] = ClusterFile.load(file)
        for role in WORKER_ROLES:
            self._files[role] = ClusterFile.load(self.keyring.issue_worker(f"fuzz-{role}", roles=(role,)))
        inputs = [path.read_bytes() for path in sorted(CORPUS.glob("m.*"))]
        self._mutator = Mutator(self.chance, {"m": inputs})
        self._lines: dict[tuple[str, bool], Line] = {}
        self._held: deque[tuple[socket.socket, int]] = deque()

    def act(self) -> None:
        """Do something."""
        act = self.chance.choices(ACTS, [weight for _, weight in _WEIGHTED])[0]
        name = act.__name__.strip("_")
        self.acts[name] = self.acts.get(name, 0) + 1
        with suppress(OSError, zmq.ZMQError):  # the master hangs up, as it should
            act(self)
        while len(self._held) > MOST_HELD or sum(nbytes for _, nbytes in self._held) > HELD_BYTES:
            self._held.popleft()[0].close()

    def close(self) -> None:
        """Hang up everywhere."""
        while self._held:
            self._held.popleft()[0].close()
        self._lines.clear()
        self._context.destroy(linger=0)

    # Without a key

    def _port(self) -> tuple[str, int]:
        one = self._files[self.chance.choice(("fuzz-all", "trainer"))]
        host, _, port = self.chance.choice((one.control, one.bulk)).removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._port(), timeout=1.0)

    def _keep(self, connection: socket.socket, nbytes: int = 0) -> None:
        if self.chance.random() < 0.5:
            connection.close()
        else:
            self._held.append((connection, nbytes))

    def _say_raw(self, data: bytes) -> None:
        connection = self._connect()
        connection.setblocking(False)
        for at in range(0, len(data), 1 + len(data) // self.chance.choice((1, 1, 3, 20))):
            with suppress(OSError):
                connection.send(data[at : at + 1 + len(data) // self.chance.choice((1, 3))])
        with suppress(OSError):
            connection.recv(65536)
        self._keep(connection)

    def _garbage(self) -> None:
        self._say_raw(self.chance.randbytes(self.chance.choice((0, 1, 10, 64, 500, 100_000))))

    def _other_protocols(self) -> None:
        said = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", b"SSH-2.0-x\r\n")
        self._say_raw(self.chance.choice(said) * self.chance.choice((1, 1, 500)))

    def _greeting(self) -> bytes:
        mechanism = self.chance.choice((b"CURVE", b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"x" * 20))
        version = self.chance.choice((b"\x03\x01", b"\x03\x00", b"\x01\x00", b"\x02\x00", b"\xff\xff"))
        return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)

    def _cut_greeting(self) -> None:
        greeting = self._greeting()
        self._say_raw(greeting[: self.chance.randrange(len(greeting) + 1)])

    def _damaged_greeting(self) -> None:
        greeting = bytearray(self._greeting())
        greeting[self.chance.randrange(len(greeting))] = self.chance.randrange(256)
        self._say_raw(bytes(greeting) + self.chance.randbytes(self.chance.choice((0, 9, 300))))

    def _false_hello(self) -> None:
        """A greeting and a command: HELLO, INITIATE, READY, a message; well-formed in its length alone, or not even."""
        name = self.chance.choice((b"HELLO", b"INITIATE", b"READY", b"ERROR", b"MESSAGE", b"PING", b""))
        body = bytes([len(name)]) + name + self.chance.randbytes(self.chance.choice((0, 50, 194, 300)))
        size = self.chance.choice((len(body), len(body), 0, 255))
        short = bytes([self.chance.choice((4, 4, 0, 1))]) + bytes([size % 256])
        long = b"\x06" + self.chance.choice((size, 2**31, 2**63 - 1, 2**64 - 1)).to_bytes(8, "big")
        self._say_raw(self._greeting() + self.chance.choice((short, short, long)) + body)

    def _crowd(self) -> None:
        """Many connections at once that say nothing, or half a greeting."""
        crowd: list[socket.socket] = []
        with suppress(OSError):
            for _ in range(100):
                crowd.append(self._connect())
                if len(crowd) % 2:
                    crowd[-1].sendall(self._greeting()[: self.chance.randrange(64)])
        for connection in crowd:
            connection.close()

    def _without_key(self) -> None:
        """Peers that speak ZMTP, with no encryption, a password, or a key that nobody knows."""
        host, port = self._port()
        with closing(self._context.socket(zmq.DEALER)) as peer:
            peer.setsockopt(zmq.LINGER, 0)
            what = self.chance.randrange(3)
            if what == 1:
                peer.setsockopt(zmq.PLAIN_USERNAME, b"acme")
                peer.setsockopt(zmq.PLAIN_PASSWORD, b"x" * self.chance.choice((1, 200)))
            elif what == 2:
                pair, known = KeyPair.generate(), self._files["fuzz-all"]
                peer.setsockopt(zmq.CURVE_SERVERKEY, known.server_public.encode())
                peer.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
                peer.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
            peer.connect(f"tcp://{host}:{port}")
            for _ in range(self.chance.choice((1, 50))):
                peer.send_multipart(encode(Ping(), id="x"), zmq.NOBLOCK)
            peer.poll(self.chance.choice((5, 50)))

    # With a key, over a line that breaks

    def _cut_line(self) -> None:
        """A handshake and messages by the book, cut or damaged after so many bytes; the rest never comes."""
        who = self.chance.choice(list(self._files))
        bulk, file = self.chance.random() < 0.5, self._files[who]
        host, _, port = (file.bulk if bulk else file.control).removeprefix("tcp://").rpartition(":")
        large = self.chance.random() < 0.3
        most = self.chance.randrange(64, 3 << 20 if large else 2000)
        damaged = self.chance.randrange(most) if self.chance.random() < 0.3 else -1
        parts = self.chance.choice((3, 60, 900)) if large else 3
        frames = [limits.MAGIC, *[bytes(4000)] * parts]
        with socket.create_server(("127.0.0.1", 0)) as listener, closing(self._dial(who, bulk, listener)) as peer:
            listener.settimeout(1.0)
            near, _ = listener.accept()
            listener.close()  # libzmq would dial again
            far = socket.create_connection((host, int(port)), timeout=1.0)
            forwarded, until, sent = 0, time.monotonic() + 0.5, False
            with near:
                while forwarded < most and time.monotonic() < until:
                    if not sent and peer.poll(0, zmq.POLLOUT):
                        peer.send_multipart(frames, zmq.NOBLOCK)
                        sent = True
                    ready, _, _ = select.select([near, far], [], [], 0.02)
                    if far in ready:
                        near.sendall(far.recv(65536) or b"")
                    if near in ready:
                        data = bytearray(near.recv(min(65536, most - forwarded)))
                        if forwarded <= damaged < forwarded + len(data):
                            data[damaged - forwarded] ^= 0x10
                        if not data:
                            break
                        far.sendall(data)
                        forwarded += len(data)
        self._keep(far, forwarded)

    def _dial(self, who: str, bulk: bool, listener: socket.socket) -> Socket:
        file, port = self._files[who], listener.getsockname()[1]
        return dial(self._context, f"tcp://127.0.0.1:{port}", file.server_public, file.keys(), bulk=bulk)

    # With a key, over a good line

    def _line(self, who: str, bulk: bool) -> Line:
        line = self._lines.get((who, bulk))
        if line is None or line.left <= 0:
            if line is not None:
                line.socket.close(0)
            file = self._files[who]
            opened = dial(
                self._context, file.bulk if bulk else file.control, file.server_public, file.keys(), bulk=bulk
            )
            line = self._lines[who, bulk] = Line(who, bulk, opened, self.chance.choice((1, 10, 100, 300)))
            opened.poll(1000, zmq.POLLOUT)
            if not bulk and who in WORKER_ROLES and self.chance.random() < 0.8:
                self._say(line, [bytes(frame) for frame in encode(self._register(who), id="r")])
        line.left -= 1
        return line

    def _say(self, line: Line, frames: Sequence[Buffer]) -> None:
        self.sent.append((time.time(), line.who, line.bulk, [bytes(frame) for frame in frames]))
        with suppress(zmq.Again):
            line.socket.send_multipart(frames, zmq.NOBLOCK)
        if self.chance.random() < 0.9:  # now and then nothing is read for a while
            with suppress(zmq.Again):
                for _ in range(100):
                    line.socket.recv_multipart(zmq.NOBLOCK)

    def again(self, who: str, bulk: bool, frames: list[bytes]) -> None:
        """Send frames as they were sent before."""
        line = self._line(who, bulk)
        line.left = max(line.left, 1)
        self._say(line, frames)

    def _register(self, role: str) -> Message:
        return Register(
            role=role,  # type: ignore[arg-type]  # one of its literals
            incarnation=f"fuzz-{role}",
            pid=1,
            credit={"train": 1, "predict": 1, "simulator": 1, "data": 1},
            backbone="other",
            backbone_name="other",
            batch_key="other",
            serves=("metaworld", "datasets", "sampler"),
        )

    def _anybody(self) -> Line:
        who = self.chance.choice(("fuzz-all", "fuzz-all", "fuzz-act", *WORKER_ROLES))
        return self._line(who, self.chance.random() < 0.25)

    def _any_frames(self) -> None:
        count = self.chance.choice((1, 1, 2, 3, 4, 10, 1027, 1028, 10_000))
        frames = [self.chance.randbytes(self.chance.choice((0, 1, 8, 30))) for _ in range(count)]
        if self.chance.random() < 0.5:
            frames[0] = limits.MAGIC
        self._say(self._anybody(), frames)

    def _too_large(self) -> None:
        line = self._anybody()
        most = limits.MAX_BULK_FRAME_BYTES if line.bulk else limits.MAX_CONTROL_FRAME_BYTES
        self._say(line, [limits.MAGIC, b"", bytes(most + 1)])
        line.left = 0

    def _bomb(self) -> None:
        kind = self.chance.choice(list(KINDS))
        self._say(self._anybody(), [limits.MAGIC, head(kind), self.chance.choice(list(BOMBS.values()))])

    def _changed_message(self) -> None:
        """A message of any kind with some of its values changed."""
        _, parts = unpack(self._mutator.next("m"))
        self._say(self._anybody(), parts[:1100] or [b""])

    def _by_the_book(self) -> None:
        """Requests that change something, so that changed ones meet something: a policy, an upload, a beat."""
        spec_line = self._line("fuzz-all", False)
        policy = self.chance.choice("abc")
        self._say(spec_line, encode(CreatePolicy(policy=policy, spec=SPEC), id="c"))
        data = self.chance.randbytes(100)
        bulk = self._line("fuzz-all", True)
        self._say(bulk, encode(BlobBegin(digest=f"{self.chance.getrandbits(256):064x}", nbytes=1 << 20), id="b"))
        self._say(bulk, encode(BlobChunk(digest="0" * 64, offset=self.chance.randrange(3)), id="d", buffers=(data,)))
        role = self.chance.choice(WORKER_ROLES)
        self._say(self._line(role, False), encode(Beat(progress=1, phase="idle", busy_s=0.0), id="h"))


_WEIGHTED: tuple[tuple[Callable[[Attacker], None], float], ...] = (
    (Attacker._garbage, 2),
    (Attacker._other_protocols, 1),
    (Attacker._cut_greeting, 3),
    (Attacker._damaged_greeting, 3),
    (Attacker._false_hello, 3),
    (Attacker._crowd, 0.05),
    (Attacker._without_key, 1),
    (Attacker._cut_line, 3),
    (Attacker._any_frames, 3),
    (Attacker._too_large, 0.3),
    (Attacker._bomb, 1),
    (Attacker._changed_message, 40),
    (Attacker._by_the_book, 1),
)
ACTS = tuple(act for act, _ in _WEIGHTED)
