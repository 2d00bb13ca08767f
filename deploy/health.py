"""Checks that the process in this container is healthy, for a HEALTHCHECK: `python -m rowcast.deploy.health [port
...]`.

Each given port must answer /healthz with 200. Without ports, it checks both usual ones: at least one must answer, and
each that answers must be healthy, so one line serves both commands. Exits with 0 or 1 and prints the answers to stdout.
Plain http only.
"""

import errno
import sys
from http.client import HTTPConnection, HTTPException

USUAL_PORTS = (9400, 9401)  # the defaults of [metrics]
LOOPBACKS = ("127.0.0.1", "::1")
NOBODY = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the last two: the host has no such loopback
TIMEOUT_S = 3.0  # per request; two of them must fit in the HEALTHCHECK's time-out


def ask(port: int, host: str = LOOPBACKS[0]) -> tuple[int, str] | None:
    """Returns status and body of /healthz; status 0 without a complete answer in time; None if the port is closed."""
    connection = HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        return None if getattr(error, "errno", None) in NOBODY else (0, f"no answer ({type(error).__name__})")
    finally:
        connection.close()


def main(ports: list[int]) -> int:
    answers = {port: ask(port) or ask(port, LOOPBACKS[1]) for port in ports or USUAL_PORTS}
    for port, answer in answers.items():
        print(f"{port}: {'nothing listens' if answer is None else answer[1]}")
    statuses = [answer[0] for answer in answers.values() if answer is not None]
    expected = len(ports) or 1
    return 0 if len(statuses) >= expected and set(statuses) == {200} else 1


if __name__ == "__main__":
    sys.exit(main([int(port) for port in sys.argv[1:]]))
