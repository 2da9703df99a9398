"""Joining and summing by the schema, JSON and the documented datagrams alone, and how these are marked."""

from __future__ import annotations

import json
import socket
import struct

from wire_client import SCHEMA, WireClient

import innet_drl as innet

VERSION = 1
FLOAT, JOIN, ACK = 0, 4, 11
EXPEDITED_FORWARDING = 46


def datagram(kind: int, session: int, round_: int, segment: int, body: bytes) -> bytes:
    place = round_ | segment << 20
    return struct.pack("<BI", VERSION << 4 | kind, session) + place.to_bytes(5, "little") + body


def receive(udp: socket.socket) -> tuple[int, int, bytes]:
    """Kind, segment and body of the next datagram, which has to be marked."""
    data, ancillary, _, _ = udp.recvmsg(2000, 100)
    ((level, kind, value),) = ancillary
    assert (level, kind) == (socket.IPPROTO_IP, socket.IP_TOS)
    assert value[0] >> 2 == EXPEDITED_FORWARDING
    assert data[0] >> 4 == VERSION
    return data[0] & 15, int.from_bytes(data[5:10], "little") >> 20, data[10:]


def test_the_schema_and_the_datagrams_are_enough_to_sum() -> None:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        host, port = server.addresses[0].removeprefix("innet://").split(":")
        join = {"job": "plain", "worker": 0, "workers": 1, "world": 1, "name": "", "arithmetic": "float"}
        join |= {"segment_values": 3, "deadline_ms": 60_000}
        gradients = SCHEMA.Extension.new_message(name="gradients")
        with WireClient((host, int(port))) as client, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            _, answer = client.call(json.dumps(join).encode(), callExtension=gradients)
            ticket = json.loads(answer)
            assert ticket["address"] == server.gradients
            to_host, to_port = ticket["address"].split(":")
            session, key = ticket["session"], bytes(ticket["key"])
            udp.settimeout(60)
            udp.setsockopt(socket.IPPROTO_IP, socket.IP_RECVTOS, 1)
            udp.connect((to_host, int(to_port)))
            prove = datagram(JOIN, session, 0, 0, key + bytes(8))
            udp.send(prove)
            kind, _, cookie = receive(udp)
            assert (kind, len(cookie)) == (JOIN, 8)
            udp.send(datagram(JOIN, session, 0, 0, key + cookie))
            assert receive(udp)[0] == ACK
            for segment, values in enumerate([(1.0, 2.0, 3.0), (4.0,)]):
                body = struct.pack(f"<{len(values)}f", *values)
                udp.send(datagram(FLOAT, session, ticket["round"], segment, body))
                assert receive(udp) == (FLOAT, segment, body)
        with innet.connect(server.addresses[0]) as replay:
            while replay.stats()["gradients"]["jobs"]:
                pass
