"""Finds this host's IPv4 addresses, without sending anything."""

import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def own_addresses() -> dict[str, str]:
    """Returns the address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def interface_toward(address: str, port: int) -> str | None:
    """Returns the interface of the IPv4 route to an address, None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, found in own_addresses().items() if found == own), None)
