"""Reads this process's rank from torchrun's variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from rowcast.job.schema import Ranks
from rowcast.runtime.errors import ConfigError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A process's position among the ranks. The defaults are for a trainer without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of this host
    local_world_size: int = 1
    address: str = "127.0.0.1"  # of the ranks' meeting point
    port: int = 0
    has_agent: bool = False  # a launcher serves the meeting point; if not, rank 0 does
    restarts: int = 0  # how often the launcher has restarted all trainers


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Raises ConfigError if torchrun's variables are incomplete or no numbers."""
    if environment.get("WORLD_SIZE", "1").strip() == "1":
        return Launch()
    numbers = {name: whole_number(name, environment.get(name, "")) for name in ENVIRONMENT}
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(
            f"RANK = {numbers['RANK']} is not below WORLD_SIZE = {numbers['WORLD_SIZE']}; start trainers by torchrun"
        )
    return Launch(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=numbers["MASTER_PORT"],
        has_agent=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=whole_number("TORCHELASTIC_RESTART_COUNT", environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def rank_in_log(environment: Mapping[str, str]) -> int | None:
    """Returns the rank for the log. None for a single trainer, and for variables that `read_launch` will refuse."""
    rank = environment.get("RANK", "").strip()
    return int(rank) if environment.get("WORLD_SIZE", "1").strip() != "1" and rank.isdigit() else None


def whole_number(name: str, text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(
            f"the environment variable {name} = {text!r} is no number; several trainers are started by torchrun, which "
            "sets it"
        )
    return int(text)


def check_launch(launch: Launch, ranks: Ranks) -> None:
    """Raises ConfigError if torchrun's number of trainers differs from the job file's."""
    if launch.world_size != ranks.count:
        raise ConfigError(
            f"WORLD_SIZE = {launch.world_size}, but ranks.count = {ranks.count}; start as many trainers as "
            "it says (torchrun's --nnodes times --nproc-per-node), or change it; a script needs none"
        )
    if launch.local_world_size != ranks.on_host:
        raise ConfigError(
            f"{launch.local_world_size} trainers were started on this host, but a host has {ranks.on_host}; "
            "set ranks.per_host to torchrun's --nproc-per-node"
        )
