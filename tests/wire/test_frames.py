import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from pollux.errors import InvalidDocument, InvalidSpec, Permanent, StaleGeneration, Temporary
from pollux.wire.credentials import ReplicaIdentity, credential, key_of
from pollux.wire.frames import MAX_BACKLOG_BYTES, Channel, Peer, accept, ask, dial, granted, parse_address
from pollux.wire.messages import MAX_MESSAGE_BYTES, pack
from pollux.wire.nodes import DescribeNode, Done, Forget, Kill, ListRuns, NodeDescription, Refused, StoreAt

TOKEN = "5ecret"
PATIENT_S = 60.0
HASTY_S = 0.05
DESCRIPTION = NodeDescription("n", 1, "0", 4)


def address_of(listening):
    return f"127.0.0.1:{listening.getsockname()[1]}"


class Server:
    """A daemon of few words in a thread of its own: `converse(peer)` is all that it does with a connection."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.loop = loop
        self.refusals: list[Exception] = []
        self.peers: list[Peer] = []


@contextlib.contextmanager
def serving(converse, *, unix=False, timeout_s=PATIENT_S):
    started, server, thread = threading.Event(), Server("", asyncio.new_event_loop()), None
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    stop = asyncio.Event()

    async def connected(reader, writer):
        try:
            peer = await accept(reader, writer, TOKEN, timeout_s)
            server.peers.append(peer)
            await converse(peer)
        except (Permanent, Temporary, InvalidDocument) as error:
            server.refusals.append(error)
        finally:
            writer.close()

    async def main():
        if unix:
            listening = await asyncio.start_unix_server(connected, folder / "s")
            server.address = f"unix:{folder / 's'}"
        else:
            listening = await asyncio.start_server(connected, "127.0.0.1", 0)
            server.address = address_of(listening.sockets[0])
        started.set()
        await stop.wait()
        listening.close()
        for peer in server.peers:
            peer.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(tasks, timeout=PATIENT_S) if tasks else None

    thread = threading.Thread(target=server.loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert started.wait(PATIENT_S)
        yield server
    finally:
        server.loop.call_soon_threadsafe(stop.set)
        thread.join()
        server.loop.close()
        shutil.rmtree(folder)


async def describe(peer):
    while True:
        await peer.receive(DescribeNode | ListRuns)
        peer.send(DESCRIPTION)
        await peer.flush()


@pytest.mark.parametrize("unix", [False, True])
def test_both_sides_prove_that_they_know_the_token_and_talk(unix):
    with serving(describe, unix=unix) as server:
        assert ask(server.address, TOKEN, DescribeNode(), PATIENT_S) == DESCRIPTION
        with Channel.connect(server.address, TOKEN, PATIENT_S) as channel:
            for _ in range(3):
                channel.send(ListRuns())
                assert channel.receive(NodeDescription, PATIENT_S) == DESCRIPTION


def test_two_daemons_talk():
    async def both():
        peer = await dial(server.address, TOKEN, PATIENT_S)
        answers = await asyncio.gather(*(peer.ask(DescribeNode()) for _ in range(5)))
        peer.close()
        return answers

    with serving(describe) as server:
        assert asyncio.run(both()) == [DESCRIPTION] * 5


MINE, OTHER = ReplicaIdentity("j", "1-0"), ReplicaIdentity("j", "1-1")


@pytest.mark.parametrize("unix", [False, True])
def test_a_replica_is_known_by_its_credential(unix):
    async def as_daemons_do():
        peer = await dial(server.address, credential(TOKEN, OTHER), PATIENT_S)
        assert await peer.ask(DescribeNode()) == DESCRIPTION
        peer.close()

    with serving(describe, unix=unix) as server:
        for secret in (credential(TOKEN, MINE), TOKEN):
            assert ask(server.address, secret, DescribeNode(), PATIENT_S) == DESCRIPTION
        asyncio.run(as_daemons_do())
        assert [peer.identity for peer in server.peers] == [MINE, None, OTHER]
        assert server.peers[0].pid == (os.getpid() if unix else None)


@pytest.mark.parametrize(
    "claim",
    [
        credential(TOKEN, MINE).replace("1-0", "1-1"),
        credential(TOKEN, MINE).replace("j/", "k/"),
        credential("another token", MINE),
        f"pollux-replica:j/1-0:{TOKEN}",
        key_of(TOKEN, MINE),
    ],
)
def test_a_credential_is_good_for_no_other_name_and_a_guess_for_none(claim):
    with serving(describe) as server:
        with pytest.raises(Permanent, match=r"refuses the (credential|token)"):
            Channel.connect(server.address, claim, PATIENT_S)
        assert server.peers == []
        assert claim.rpartition(":")[2] not in str(server.refusals)


def test_what_was_overheard_is_of_no_use_on_another_connection():
    with serving(describe) as server:
        target = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        relay = socket.create_server(("127.0.0.1", 0))
        overheard = []

        def eavesdrop():
            with relay.accept()[0] as here, socket.create_connection(target) as there:
                here.sendall(there.recv(4096))
                overheard.append(here.recv(4096))
                there.sendall(overheard[0])
                here.sendall(there.recv(4096))

        thread = threading.Thread(target=eavesdrop)
        thread.start()
        Channel.connect(address_of(relay), credential(TOKEN, MINE), PATIENT_S).close()
        thread.join()
        relay.close()
        assert str(MINE).encode() in overheard[0]
        assert key_of(TOKEN, MINE).encode() not in overheard[0]
        with socket.create_connection(target) as again:
            again.recv(4096)
            again.sendall(overheard[0])
            assert again.recv(4096) == bytes(4)  # wrong key


@pytest.mark.parametrize("name", [b"j", b"/1-0", b"j/", b"\xff/1-0", b"j/1/0", b"j\0/1-0", b"x" * 600])
def test_names_that_no_replica_has_are_refused(name):
    with serving(describe) as server:
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as sock:
            sock.recv(4096)
            body = bytes(64) + name
            sock.sendall(len(body).to_bytes(4, "big") + body)
            assert sock.recv(4096) in (bytes(4), b"")
        assert server.peers == []


def test_a_daemon_that_does_not_know_the_key_of_a_replica_is_found_out():
    listening = socket.create_server(("127.0.0.1", 0))

    def impostor():
        with listening.accept()[0] as sock:
            sock.sendall((32).to_bytes(4, "big") + bytes(32))
            sock.recv(4096)
            sock.sendall((32).to_bytes(4, "big") + bytes(32))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(Permanent, match="no daemon of ours"):
        Channel.connect(address_of(listening), credential(TOKEN, MINE), PATIENT_S)
    thread.join()
    listening.close()


def test_a_wrong_token_is_refused_on_both_sides():
    with serving(describe) as server:
        with pytest.raises(Permanent, match="refuses the token"):
            Channel.connect(server.address, "guess", PATIENT_S)
        with pytest.raises(Permanent, match="refuses the token"):
            asyncio.run(dial(server.address, "guess", PATIENT_S))
        assert ask(server.address, TOKEN, DescribeNode(), PATIENT_S) == DESCRIPTION
    assert any("does not know the token" in str(error) for error in server.refusals)


def test_a_stranger_who_repeats_an_old_handshake_is_found_out():
    heard = {}

    def impostor(listening):
        """Says what a daemon said to somebody else."""
        sock, _ = listening.accept()
        with sock, sock.makefile("rwb", buffering=0) as stream:
            stream.write(heard["nonce"])
            stream.read(4 + 64)
            stream.write(heard["proof"])
            stream.read(1)

    with serving(describe) as server:
        target = parse_address(server.address)
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def relay():
                sock, _ = listening.accept()
                with sock, socket.create_connection(target) as daemon:
                    heard["nonce"] = daemon.recv(36, socket.MSG_WAITALL)
                    sock.sendall(heard["nonce"])
                    daemon.sendall(sock.recv(68, socket.MSG_WAITALL))
                    heard["proof"] = daemon.recv(36, socket.MSG_WAITALL)
                    sock.sendall(heard["proof"])

            for role in (relay, lambda: impostor(listening)):
                thread = threading.Thread(target=role)
                thread.start()
                address = address_of(listening)
                if role is relay:
                    Channel.connect(address, TOKEN, PATIENT_S).close()
                else:
                    with pytest.raises(Permanent, match="no daemon of ours"):
                        Channel.connect(address, TOKEN, PATIENT_S)
                thread.join()


def test_the_token_never_crosses_the_line():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        seen = []

        def record():
            sock, _ = listening.accept()
            with sock:
                sock.sendall((32).to_bytes(4, "big") + bytes(32))
                seen.append(sock.recv(1000))

        thread = threading.Thread(target=record)
        thread.start()
        with pytest.raises(Temporary):
            Channel.connect(address_of(listening), TOKEN, PATIENT_S)
        thread.join()
    assert TOKEN.encode() not in seen[0]


def test_nobody_listens_or_nobody_answers_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = address_of(listening)
        with pytest.raises(Temporary, match=address):
            Channel.connect(address, TOKEN, HASTY_S)
        with pytest.raises(Temporary, match=address):
            asyncio.run(dial(address, TOKEN, HASTY_S))
    with pytest.raises(Temporary, match=address):
        Channel.connect(address, TOKEN, PATIENT_S)
    with pytest.raises(Temporary):
        Channel.connect("unix:/tmp/no-such-socket", TOKEN, PATIENT_S)


def test_who_says_nothing_is_cut_off_and_disturbs_nobody():
    with (
        serving(describe, timeout_s=HASTY_S) as server,
        socket.create_connection(parse_address(server.address)) as mute,
    ):
        assert ask(server.address, TOKEN, DescribeNode(), PATIENT_S) == DESCRIPTION
        mute.settimeout(PATIENT_S)
        with contextlib.suppress(ConnectionResetError):
            while mute.recv(100):
                pass
    assert any(isinstance(error, Temporary) for error in server.refusals)


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        (3).to_bytes(4, "big") + b"{}}",
        (2).to_bytes(4, "big") + b"\xff\xfe",
        (0).to_bytes(4, "big"),
    ],
)
def test_what_is_no_message_is_refused(frame):
    with serving(describe) as server:
        with Channel.connect(server.address, TOKEN, PATIENT_S) as channel:
            channel._socket.send(frame)
            with pytest.raises(Temporary):
                channel.receive(NodeDescription, PATIENT_S)
        assert ask(server.address, TOKEN, DescribeNode(), PATIENT_S) == DESCRIPTION
    assert any(isinstance(error, InvalidDocument) for error in server.refusals)


def test_an_oversized_frame_is_refused_by_the_blocking_side():
    async def shout(peer):
        peer._writer.write((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        await peer.receive(Done)

    with serving(shout) as server, Channel.connect(server.address, TOKEN, PATIENT_S) as channel:
        with pytest.raises(InvalidDocument, match="larger than"):
            channel.receive(Done, PATIENT_S)
        with pytest.raises(Temporary):
            channel.send(Done())


def test_a_message_of_another_type_is_refused_and_the_next_one_is_read():
    async def mix(peer):
        peer.send(StoreAt("a:1"))
        peer.send(Done())
        await peer.receive(Done)

    with serving(mix) as server, Channel.connect(server.address, TOKEN, PATIENT_S) as channel:
        with pytest.raises(InvalidDocument, match="StoreAt"):
            channel.receive(Done | Refused, PATIENT_S)
        assert channel.receive(Done | Refused, PATIENT_S) == Done()


def test_a_message_may_come_in_pieces_and_late():
    frame = pack(Done())
    frame = len(frame).to_bytes(4, "big") + frame
    go_on = threading.Event()

    async def drip(peer):
        peer._writer.write(frame[:9])
        await asyncio.to_thread(go_on.wait, PATIENT_S)
        for byte in frame[9:]:
            peer._writer.write(bytes([byte]))
            await peer.flush()
        await peer.receive(Done)

    with serving(drip) as server, Channel.connect(server.address, TOKEN, PATIENT_S) as channel:
        with pytest.raises(TimeoutError):
            channel.receive(Done, HASTY_S)
        go_on.set()
        assert channel.receive(Done, PATIENT_S) == Done()


def test_one_thread_may_send_what_is_large_while_another_receives():
    large = Refused("x" * (MAX_MESSAGE_BYTES - 1000))

    async def echo(peer):
        while True:
            peer.send(await peer.receive(Refused))
            await peer.flush()

    with serving(echo) as server, Channel.connect(server.address, TOKEN, PATIENT_S) as channel:
        senders = [threading.Thread(target=channel.send, args=(large, PATIENT_S)) for _ in range(3)]
        for sender in senders:
            sender.start()
        assert [channel.receive(Refused, PATIENT_S) for _ in senders] == [large] * 3
        for sender in senders:
            sender.join()


def test_closing_ends_a_receive_in_another_thread():
    with serving(describe) as server:
        channel = Channel.connect(server.address, TOKEN, PATIENT_S)
        ends = []

        def wait():
            try:
                channel.receive(Done)
            except Temporary as error:
                ends.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        channel.close()
        channel.close()
        thread.join(PATIENT_S)
        assert ends
        with pytest.raises(Temporary):
            channel.send(Done())


def test_a_peer_that_does_not_read_is_dropped_and_the_daemon_does_not_wait_for_it():
    dropped = threading.Event()

    async def flood(peer):
        large = Refused("x" * (MAX_MESSAGE_BYTES // 2))
        sends = (peer.send(large) for _ in range(4 * MAX_BACKLOG_BYTES // MAX_MESSAGE_BYTES))
        with pytest.raises(Temporary, match="does not read"):
            list(sends)  # never waits: not one byte of it has been read
        dropped.set()

    with serving(flood) as server, Channel.connect(server.address, TOKEN, PATIENT_S):
        assert dropped.wait(PATIENT_S)


def test_a_refusal_is_an_error_where_it_was_asked():
    with pytest.raises(Permanent, match="no such job"):
        granted(Forget("j", 1), Refused("no such job"))
    with pytest.raises(StaleGeneration) as caught:
        granted(Kill("j", "1-0", 9), Refused("stale", is_stale=True, generation=7))
    assert (caught.value.job, caught.value.current) == ("j", 7)
    assert granted(ListRuns(), Done()) == Done()


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "unix:s", "unix:"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(InvalidSpec, match="address"):
        parse_address(address)


def test_addresses():
    assert parse_address("host:1") == ("host", 1)
    assert parse_address("[::1]:80") == ("::1", 80)
    assert parse_address("unix:/a/b") == "/a/b"
    with pytest.raises(InvalidSpec, match="too long"):
        parse_address("unix:/" + "a" * 107)
