#!/usr/bin/env bash
# Builds the image, runs compose.yaml and the Pod of kubernetes.yaml with podman, stops and kills them, and compares the bits with those of
# an undisturbed run: `make containers` as root                                                                     (docs/deploy.md, Tests)
#
# Needs root, 10 GB in TMPDIR and /var/tmp, port 9090 and, on Debian 12:
#   apt-get install podman runc iptables netavark aardvark-dns catatonit debootstrap python3-venv curl
#
# No registry is needed: the base image consists of Debian's packages. So Python and Prometheus have Debian's versions, and there is no
# Grafana. Images, containers, volumes and networks lie in a temporary folder, apart from those of this host, and are removed with it.
#
#   BUILD_OPTIONS     more options for `podman build`, such as --build-arg TORCH_CPU_INDEX=https://...
#   STORAGE_DRIVER    vfs if TMPDIR's file system has no overlay: slower, and needs several times the space
set -euo pipefail
cd "$(dirname "$0")/.."

STOP_AT=(100 200 300) # train steps: a stop, a loss of the trainer, a loss of both
WAIT_S=600            # for each state that a run must reach
TMPFS="mode=0700,uid=10001,gid=10001"
PAIR=(rowcast_prefetcher_1 rowcast_trainer_1)
POD=(rowcast-prefetcher rowcast-trainer)
RESULTS=(model.safetensors container/losses.f32) # below /runs

if ((EUID != 0)); then
    echo "containers.sh: containers need root here; start it as root" >&2
    exit 2
fi
for program in podman runc iptables debootstrap curl python3; do
    if ! command -v "$program" >/dev/null; then
        echo "containers.sh: $program is missing; the first lines of this file name Debian's packages" >&2
        exit 2
    fi
done

work=$(mktemp --directory --tmpdir rowcast-containers.XXXXXXXX)
log=$work/log
export CONTAINERS_CONF=$work/containers.conf CONTAINERS_STORAGE_CONF=$work/storage.conf ROWCAST_JOB=$work/job.toml
read -ra build_options <<<"${BUILD_OPTIONS:-}"

say() { printf '%5d s  %s\n' "$SECONDS" "$*"; }

fail() {
    say "FAILED: $*"
    tail --lines 40 "$log"
    exit 1
}

quietly() { "$@" >>"$log" 2>&1 || fail "code $? of: $*"; }

compose() { "$work/venv/bin/podman-compose" --file deploy/compose.yaml --file "$work/override.yaml" "$@"; }

clean_up() {
    set +e
    {
        if [[ -f $work/pod.yaml ]]; then podman kube down "$work/pod.yaml"; fi
        if [[ -x $work/venv/bin/podman-compose ]]; then compose down --volumes --timeout 1; fi
        podman volume rm --force rings sockets rowcast-runs rowcast-data rowcast-job
        podman network rm podman-default-kube-network
        umount --recursive "$work/storage/overlay"
    } >>"$log" 2>&1
    rm --recursive --force --one-file-system "$work"
}

# Settings

settings() {
    local memlock
    memlock=$(ulimit -H -l)
    if [[ $memlock == unlimited ]]; then memlock=-1; else memlock=$((memlock * 1024)); fi
    cat >"$work/storage.conf" <<END
[storage]
driver = "${STORAGE_DRIVER:-overlay}"
graphroot = "$work/storage"
runroot = "$work/run"
END
    # podman's defaults for limits are higher than a host without CAP_SYS_RESOURCE may set
    cat >"$work/containers.conf" <<END
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "$work/libpod"
[network]
network_backend = "netavark"
network_config_dir = "$work/networks"
END
    # podman 4.3 takes a tmpfs volume's size only in pages
    local limits="ulimits: { memlock: { soft: $memlock, hard: $memlock }, nofile: 4096, nproc: 4096 }"
    cat >"$work/override.yaml" <<END
services:
  prefetcher: { $limits }
  trainer: { $limits }
  prometheus: { image: "localhost/prometheus:debian" }
volumes:
  rings: { driver_opts: { o: "nr_blocks=131072,$TMPFS" } }
  sockets: { driver_opts: { o: "nr_blocks=256,$TMPFS" } }
END
    # the example's job: shorter, with more checkpoints
    sed -e 's/^samples = .*/samples = 1200000/' -e '/^\[checkpoint\]/,/^every/s/^every = .*/every = 20/' \
        examples/container.toml >"$ROWCAST_JOB"
}

build() {
    local options=(--layers=false --network=host --ulimit=nofile=4096:4096 --ulimit=nproc=4096:4096)
    quietly debootstrap --variant=minbase --include=ca-certificates,python3-venv,python-is-python3 bookworm "$work/base"
    tar --directory "$work/base" --create --file "$work/base.tar" .
    quietly podman import "$work/base.tar" localhost/python:debian
    rm --recursive --force --one-file-system "$work/base" "$work/base.tar"
    quietly podman build --file deploy/Dockerfile --tag rowcast:cpu --build-arg=PYTHON=debian \
        "${options[@]}" "${build_options[@]}" .
    cat >"$work/Dockerfile" <<END
FROM python:debian
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus
RUN install --directory --owner=nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
END
    quietly podman build --file "$work/Dockerfile" --tag prometheus:debian "${options[@]}" "$work/networks"
    quietly python3 -m venv "$work/venv"
    quietly "$work/venv/bin/pip" install podman-compose==1.6.0
    say "built: rowcast:cpu, $(podman images --format '{{.Size}}' rowcast:cpu)"
}

# The Job's Pod without a GPU, and its ConfigMap with the same job file. Other thread counts would give other bits.
make_pod() {
    "$work/venv/bin/python" - "$ROWCAST_JOB" >"$work/pod.yaml" <<END
import sys
import yaml

with open("deploy/kubernetes.yaml") as manifest:
    objects = {found["kind"]: found for found in yaml.safe_load_all(manifest)}
config, template = objects["ConfigMap"], objects["Job"]["spec"]["template"]
with open(sys.argv[1]) as job:
    config["data"]["job.toml"] = job.read()
for container in template["spec"]["containers"]:
    container["image"] = "localhost/rowcast:cpu"
    container["args"] = [word for word in container["args"] if not word.startswith("--set=trainer.threads=")]
    container["resources"]["limits"].pop("nvidia.com/gpu", None)
pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {**template["metadata"], "name": "rowcast"}, "spec": template["spec"]}
yaml.safe_dump_all([config, pod], sys.stdout)
END
}

# States of a run

wait_until() { # SENTENCE CONDITION...
    local end=$((SECONDS + WAIT_S)) sentence=$1
    shift
    until "$@"; do
        if ((SECONDS >= end)); then fail "$sentence did not happen within $WAIT_S s"; fi
        sleep 0.5
    done
}

starts() { # CONTAINER: how often it was ready
    podman logs "$1" 2>&1 | grep --count --extended-regexp 'event"?[=:] ?"?ready' || true
}

began() { # CONTAINER: the step after which its last start began
    local step='s/.*after_train_steps"?[=:] ?([0-9]+).*/\1/p'
    podman logs "$1" 2>&1 | sed --quiet --regexp-extended "/event\"?[=:] ?\"?ready/$step" | tail --lines 1
}

has_started() { (($(starts "$1") >= $2)); } # CONTAINER TIMES

runs_of() { podman volume inspect --format '{{.Mountpoint}}' "$1"; } # VOLUME

has_checkpoint() { # VOLUME STEP
    local found
    for found in "$(runs_of "$1")"/container/checkpoints/step-*/manifest.json; do
        found=${found%/manifest.json}
        if [[ -d $found ]] && ((10#${found##*/step-} >= $2)); then return 0; fi
    done
    return 1
}

codes() { podman inspect --format '{{.State.ExitCode}}' "$@" | paste --serial --delimiters=' '; }

have_ended() { [[ $(podman inspect --format '{{.State.Running}}' "$@" | sort --unique) == false ]]; }

finish() { # CONTAINER...
    wait_until "the end of $*" have_ended "$@"
    local found
    found=$(codes "$@")
    if [[ $found != "0 0" ]]; then fail "exit codes $found: $(podman logs --tail 3 "$@" 2>&1)"; fi
}

up() { # COUNT: starts compose and waits until the prefetcher was ready so often
    quietly compose up --detach --no-build prefetcher trainer prometheus
    wait_until "start $1 of the prefetcher" has_started "${PAIR[0]}" "$1"
}

export_and_keep() { # VOLUME FOLDER
    quietly podman run --rm --network=none --read-only --volume="$1:/runs" rowcast:cpu \
        rowcast export --run /runs/container --out /runs/model.safetensors
    mkdir "$2"
    local name
    for name in "${RESULTS[@]}"; do cp "$(runs_of "$1")/$name" "$2/"; done
}

compare() { # FOLDER SENTENCE
    local name differing
    for name in "${RESULTS[@]##*/}"; do
        differing=$({ cmp --verbose "$work/undisturbed/$name" "$1/$name" || true; } | wc --lines)
        say "$2, $name: $differing of $(stat --format %s "$1/$name") bytes differ from the undisturbed run"
        if ((differing > 0)) || ! cmp --quiet "$work/undisturbed/$name" "$1/$name"; then fail "$name differs"; fi
    done
}

# The runs

undisturbed() {
    up 1
    finish "${PAIR[@]}"
    export_and_keep rowcast_runs "$work/undisturbed"
    quietly compose down --volumes
    say "compose, undisturbed: codes 0 0"
}

disturbed() {
    up 1
    wait_until "a checkpoint" has_checkpoint rowcast_runs "${STOP_AT[0]}"
    local name
    for name in "${PAIR[@]}"; do quietly podman healthcheck run "$name"; done
    wait_until "a scrape of both processes" both_are_scraped
    say "compose, start: both healthy, Prometheus scrapes both"
    quietly compose stop
    if [[ $(codes "${PAIR[@]}") != "0 0" ]]; then fail "exit codes $(codes "${PAIR[@]}") after a stop"; fi
    say "compose, stop: codes 0 0"
    up 2
    say "compose, start again: continues after step $(began "${PAIR[0]}")"
    wait_until "a checkpoint" has_checkpoint rowcast_runs "${STOP_AT[1]}"
    # as the kernel does without memory: not through podman, which would take it for a stop
    kill -KILL "$(podman inspect --format '{{.State.Pid}}' "${PAIR[1]}")"
    wait_until "a restart by the policy" restarted "${PAIR[1]}"
    wait_until "a checkpoint" has_checkpoint rowcast_runs "${STOP_AT[2]}"
    if [[ $(podman inspect --format '{{.RestartCount}}' "${PAIR[0]}") != 0 ]]; then fail "the prefetcher ended with the trainer"; fi
    say "compose, SIGKILL of the trainer: restarted by its policy, the prefetcher waited, the run goes on"
    quietly podman kill --signal=KILL "${PAIR[@]}"
    wait_until "the end of both" have_ended "${PAIR[@]}"
    say "compose, SIGKILL of both: codes $(codes "${PAIR[@]}")"
    local before
    before=$(starts "${PAIR[0]}")
    up $((before + 1))
    say "compose, start again: continues after step $(began "${PAIR[0]}")"
    finish "${PAIR[@]}"
    export_and_keep rowcast_runs "$work/disturbed"
    quietly compose down --volumes
    compare "$work/disturbed" "compose"
}

both_are_scraped() {
    [[ $(curl --silent --get --data-urlencode 'query=sum(up)' http://127.0.0.1:9090/api/v1/query) == *'"2"'* ]]
}

restarted() { [[ $(podman inspect --format '{{.State.Running}} {{.RestartCount}}' "$1") == "true 1" ]]; }

play() {
    quietly podman kube play "$work/pod.yaml"
    wait_until "the start of the Pod's prefetcher" has_started "${POD[0]}" 1
}

pod() {
    make_pod
    # podman 4.3 has no emptyDir in memory and no fsGroup: these volumes take their names
    quietly podman volume create --opt=type=tmpfs --opt=device=tmpfs --opt="o=nr_blocks=131072,$TMPFS" rings
    quietly podman volume create --opt=type=tmpfs --opt=device=tmpfs --opt="o=nr_blocks=256,$TMPFS" sockets
    play
    wait_until "a checkpoint" has_checkpoint rowcast-runs "${STOP_AT[0]}"
    quietly podman pod stop --time=45 rowcast
    if [[ $(codes "${POD[@]}") != "75 0" ]]; then fail "exit codes $(codes "${POD[@]}") of a stopped Pod"; fi
    say "Pod, stop: codes 75 0"
    quietly podman kube down "$work/pod.yaml"
    play
    say "Pod, a new one: continues after step $(began "${POD[0]}")"
    finish "${POD[@]}"
    export_and_keep rowcast-runs "$work/pod"
    compare "$work/pod" "Pod"
}

trap clean_up EXIT
settings
mkdir "$work/networks"
build
undisturbed
disturbed
pod
say "done"
