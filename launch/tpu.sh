#!/usr/bin/env bash
# A training run on a Cloud TPU slice, spot or not, whatever its number of hosts. docs/cloud.md walks through it.
#
#   launch/tpu.sh create                      ask for the slice, and wait until it is there and lets us in
#   launch/tpu.sh setup                       copy the last commit to all hosts, and install it
#   launch/tpu.sh run --config=configs/large.py --workdir=/mnt/runs/large     start training on all hosts
#   launch/tpu.sh watch                       follow what process 0 prints; Ctrl-C stops watching only
#   launch/tpu.sh stop                        let the run save itself and end
#   launch/tpu.sh resume                      after a preemption: a new slice, and the same run from its newest checkpoint
#   launch/tpu.sh delete                      give the slice back
#
# --dry-run in front of the command prints what would be done. Settings are variables of the environment:
#   NAME     of the slice (diffeqformer)              ZONE     such as us-west4-a (needed)
#   TYPE     of the slice (v5litepod-64)              RUNTIME  of its hosts (v2-alpha-tpuv5-lite)
#   PROJECT  (gcloud's own)                           SPOT     1 for a spot slice, much cheaper and taken away at any time
#   NFS      address:/share, such as a Filestore's, mounted at /mnt/runs: work folders must be on a disk that all hosts share
#   PAUSE    seconds between two looks at what we wait for (30)

set -euo pipefail
cd "$(dirname "$0")/.."
name=${NAME:-diffeqformer}
type=${TYPE:-v5litepod-64}
runtime=${RUNTIME:-v2-alpha-tpuv5-lite}
pause=${PAUSE:-30}
here=.launch/$name # the options of the last run

fail() {
  echo "launch/tpu.sh: $1" >&2
  exit 1
}

dry=
[[ ${1-} == --dry-run ]] && dry=1 && shift
command=${1-}
[[ $command =~ ^(create|setup|run|watch|stop|resume|delete)$ ]] || { sed -n '2,19s/^# \{0,1\}//p' "$0" && exit 2; }
shift
[[ $command == run || $# == 0 ]] || fail "$command: takes no options, but got $1"
[[ -n ${ZONE-} ]] || fail "ZONE: name the zone of the slice, for example ZONE=us-west4-a"
[[ -n $dry ]] || command -v gcloud >/dev/null || fail "gcloud: isn't installed; see https://cloud.google.com/sdk/docs/install"
where=(--zone="$ZONE" ${PROJECT:+--project="$PROJECT"})

do_it() { # print a command, and run it unless this is a dry run
  printf '+' >&2
  printf ' %q' "$@" >&2
  echo >&2
  [[ -n $dry ]] || "$@"
}

queue() { do_it gcloud compute tpus queued-resources "$@" "${where[@]}"; }

on() { # WORKERS COMMAND
  do_it gcloud compute tpus tpu-vm ssh "$name" --worker="$1" --command="$2" "${where[@]}"
}

state() {
  gcloud compute tpus queued-resources describe "$name" --format='value(state.state)' "${where[@]}" 2>/dev/null || echo NONE
}

create() {
  queue create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$runtime" ${SPOT:+--spot}
  [[ -z $dry ]] || return 0
  local now
  until now=$(state) && [[ $now == ACTIVE ]]; do
    [[ ! $now =~ ^(FAILED|SUSPENDING|SUSPENDED|DELETING|NONE)$ ]] || fail "$name: the slice is $now; see 'gcloud compute tpus queued-resources describe $name', then delete it"
    echo "$(date +%T) $name: $now"
    sleep "$pause"
  done
  until on all true; do
    echo "$(date +%T) $name: waiting for ssh"
    sleep "$pause"
  done
}

setup() {
  local archive
  archive=$(mktemp -d)/diffeqformer.tar.gz
  do_it git archive --output="$archive" HEAD
  do_it gcloud compute tpus tpu-vm scp "$archive" "$name:diffeqformer.tar.gz" --worker=all "${where[@]}"
  on all "set -e; mkdir -p diffeqformer; tar -xzf diffeqformer.tar.gz -C diffeqformer; cd diffeqformer
command -v ~/.local/bin/uv || curl -LsSf https://astral.sh/uv/install.sh | sh
~/.local/bin/uv venv --allow-existing --python 3.11 .venv
~/.local/bin/uv pip install --quiet --python .venv/bin/python -e '.[tpu]' -c constraints.txt
${NFS:+sudo apt-get install -qq nfs-common; sudo mkdir -p /mnt/runs; mountpoint -q /mnt/runs || sudo mount $NFS /mnt/runs; sudo chmod 777 /mnt/runs}"
}

run() {
  [[ $# -gt 0 ]] || fail "run: give the options of diffeqformer.main, for example --config=configs/large.py"
  local options
  options=$(printf ' %q' "$@")
  if [[ -z $dry ]]; then
    mkdir -p "$here"
    printf '%s\n' "$@" >"$here/options"
  fi
  on all "cd diffeqformer; nohup .venv/bin/python -m diffeqformer.main$options >>run.log 2>&1 </dev/null & echo \$! >run.pid"
}

resume() {
  [[ -f $here/options ]] || fail "resume: no run was started from here on $name; use 'run'"
  local options
  mapfile -t options <"$here/options"
  if [[ -n $dry || $(state) != ACTIVE ]]; then
    delete
    create
    setup
  fi
  run "${options[@]}"
}

watch() { on 0 "tail -n 50 -F diffeqformer/run.log"; }

stop() { on all "kill -TERM \$(cat diffeqformer/run.pid)"; }

delete() {
  [[ -z $dry && $(state) == NONE ]] || queue delete "$name" --force --quiet
}

"$command" "$@"
