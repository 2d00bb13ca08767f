"""Accepts or refuses each tcp caller by its proven key: the prefetcher's ZAP handler.

    caller -- CURVE handshake --> socket -- ZAP request: address, public key --> ClientAuth.answer, on the link's thread
                                         <-- 200, or 400 --------------------

The keys are reread for each caller, so removing a file excludes its holder without a restart. Any error refuses the
caller.
"""

from pathlib import Path

import zmq
from zmq.utils import z85

from rowcast.protocol.transport.curve_keys import CLIENTS, allowed_clients, fingerprint
from rowcast.protocol.transport.refusals import Refusals

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # RFC 27
ZAP_VERSION = b"1.0"
DOMAIN = b"rowcast"


class ClientAuth:
    """Call `open` before the guarded socket is bound. The caller closes `sockets` after that socket."""

    def __init__(self, keys: Path, refusals: Refusals) -> None:
        self.sockets: list[zmq.Socket[bytes]] = []  # the socket that receives requests, once it is open
        self._keys = keys
        self._refusals = refusals

    def open(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.sockets.append(context.socket(zmq.REP))
        self.sockets[0].bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        for socket in self.sockets:
            while socket.poll(0):
                socket.send_multipart(self._answer_to(socket.recv_multipart(zmq.NOBLOCK)))

    def _answer_to(self, request: list[bytes]) -> list[bytes]:
        _, request_id, _, address, _, mechanism, *credentials = request  # RFC 27, version 1.0, from our own libzmq
        name = self._name_of(credentials[0]) if mechanism == b"CURVE" and credentials else None
        if name is None:
            self._refuse(address.decode(errors="replace"), credentials)
        status = (b"400", b"this key is not allowed") if name is None else (b"200", b"OK")
        return [ZAP_VERSION, request_id, *status, (name or "").encode(), b""]

    def _name_of(self, raw_key: bytes) -> str | None:
        try:
            return allowed_clients(self._keys).get(z85.encode(raw_key))
        except (OSError, ValueError):
            return None

    def _refuse(self, address: str, credentials: list[bytes]) -> None:
        key = fingerprint(z85.encode(credentials[0])) if credentials else "none"
        # the router counts it when it disconnects
        self._refusals.say(f"refused a caller whose key is not in {CLIENTS}/", address=address, key=key)
