"""What the trainer would find where it runs. Asked of a process of its own: this one never imports torch."""

import json
import subprocess
import sys
from dataclasses import dataclass

TIMEOUT_S = 120.0
QUESTION = """
import json, sys
from rowcast.trainer.execute.streams import choose_device
try:
    device = choose_device(sys.argv[1])
except ValueError as error:
    answer = {"refusal": str(error)}
else:
    import torch
    on_cuda = device.type == "cuda"
    name = f"{device} ({torch.cuda.get_device_name(device)})" if on_cuda else str(device)
    answer = {"name": name, "free_bytes": torch.cuda.mem_get_info(device)[0] if on_cuda else None}
print(json.dumps(answer))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    name: str = "none"
    free_bytes: int | None = None  # of its own memory; None: it has none
    refusal: str | None = None  # why there is no such device


def ask_device(name: str, command: tuple[str, ...] = (sys.executable, "-c", QUESTION)) -> Device:
    """What `trainer.device = name` stands for on this machine. `command` is for tests."""
    try:
        asked = subprocess.run([*command, name], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
        return Device(**json.loads(asked.stdout))
    except subprocess.TimeoutExpired:
        return Device(
            refusal=f"torch did not say within {TIMEOUT_S:g} s which device trainer.device = {name!r} is; look at the driver"
        )
    except (subprocess.CalledProcessError, OSError, ValueError, TypeError) as failure:
        said = getattr(failure, "stderr", None) or str(failure)
        last = said.strip().splitlines()[-1]
        return Device(
            refusal=f"the trainer's process cannot say which device trainer.device = {name!r} is ({last}); repair torch first"
        )
