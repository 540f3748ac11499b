#!/usr/bin/env bash
# A training run on one or more Cloud TPU slices, spot or not, with any number of hosts: docs/cloud.md shows how.
#
#   launch/tpu.sh create                      request the slice, unless that is done already, and wait until ssh works
#   launch/tpu.sh setup                       copy the last commit to all hosts and install it
#   launch/tpu.sh run OPTIONS                 examine all hosts, and start training on them if nothing is wrong, with
#                                             these options of diffeqformer.main
#   launch/tpu.sh watch                       follow the output of host 0, or of WORKER=3, until the run ends, and
#                                             resume it after each preemption; Ctrl-C stops watching only
#   launch/tpu.sh do evaluate --workdir=gs://my-bucket/runs/large      run another command on all hosts, and show it
#   launch/tpu.sh stop                        let the run save itself and end, and wait for that
#   launch/tpu.sh resume                      after a preemption: a new slice with the settings of create and the commit
#                                             of setup, and the same run from its last checkpoint
#   launch/tpu.sh delete                      give the slice back
#
# The options of a run, for example:
#   launch/tpu.sh run --config=configs/large.py --config.data.remote=gs://my-bucket/stores \
#     --workdir=gs://my-bucket/runs/large
# Without data.remote, every host would download and prepare the corpus itself.
#
# --dry-run in front of the command prints what it needs and what would be done. To continue an interrupted command,
# run it again.
# Settings are environment variables, with their defaults in parentheses:
#   NAME     of the slice (diffeqformer)              ZONE     such as us-west4-a (required)
#   TYPE     of the slice (v5litepod-64)              RUNTIME  of its hosts (by the type: v5litepod, v5p, v6e or tpu7x)
#   SLICES   of that type (1), joined by the data centre's network
#   PROJECT  (gcloud's own)                           SPOT     1 for a spot slice, much cheaper but preemptible
#   NFS      address:/share, such as a Filestore's, mounted at /mnt/runs. All hosts must share the work folder, so this
#            is needed unless --workdir is on gs://
#   EXTRAS   more extras of the package for setup to install, such as eval, which downstream needs
#   DOCTOR   0 to start or resume a run without examining the hosts (1)
#   PAUSE    seconds between two checks of the slice's state (30)

set -euo pipefail
cd "$(dirname "$0")/.."
name=${NAME:-diffeqformer}
key=$HOME/.ssh/google_compute_engine # gcloud's
# options: those of the last run, quoted; examined: those of a run that can start; settings: of the slice, where none
# are given; commit: which its hosts have; ready: exists once they are set up
here=.launch/$name
pause=${PAUSE:-30}
uv=0.13.9 # installs the package on the hosts
lost='FAILED|SUSPENDING|SUSPENDED' # final states of a slice

fail() {
  echo "launch/tpu.sh: $1" >&2
  exit 1
}

dry=
[[ ${1-} == --dry-run ]] && dry=1 && shift
command=${1-}
[[ $command =~ ^(create|setup|run|watch|do|stop|resume|delete)$ ]] || {
  sed -n '2,/^$/s/^# \{0,1\}//p' launch/tpu.sh
  exit 2
}
shift
# shellcheck source=/dev/null
[[ $command == create || ! -f $here/settings ]] || source "$here/settings"
type=${TYPE:-v5litepod-64}
case $type in
  v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  tpu7x-*) runtime=v2-alpha-tpu7-ubuntu2404 ;;
  *) runtime= ;;
esac
runtime=${RUNTIME:-$runtime}
[[ -n $runtime ]] || fail "RUNTIME: name the runtime of a $type; those of v5litepod, v5p, v6e and tpu7x are known"
slices=${SLICES:-1}
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "SLICES: must be a number of slices, but it is $slices"
names=("$name")
for ((slice = 0; slices > 1 && slice < slices; slice++)); do names[slice]=$name-$slice; done # as --node-prefix does
[[ $command == run || $command == "do" || $# == 0 ]] || fail "$command: takes no options, but got $1"
[[ ${NFS-} =~ ^([A-Za-z0-9.-]+:/[A-Za-z0-9._/-]*)?$ ]] || fail "NFS: must be like 10.0.0.2:/share, but it is $NFS"
[[ ${EXTRAS-} =~ ^[a-z,]*$ ]] || fail "EXTRAS: must be names such as eval, separated by commas, but it is $EXTRAS"
[[ -n ${ZONE-} ]] || fail "ZONE: name the zone of the slice, for example ZONE=us-west4-a"
[[ -n $dry ]] || command -v gcloud >/dev/null ||
  fail "gcloud: not installed; see https://cloud.google.com/sdk/docs/install"
[[ ${SPOT-} =~ ^[01]?$ ]] || fail "SPOT: must be 1 or 0, but it is $SPOT"
[[ ${DOCTOR-1} =~ ^[01]$ ]] || fail "DOCTOR: must be 1 or 0, but it is $DOCTOR"
spot=
[[ ${SPOT-} != 1 ]] || spot=--spot
where=(--zone="$ZONE" ${PROJECT:+--project="$PROJECT"})
[[ -n $dry ]] || mkdir -p "$here"

do_it() { # print a command, and run it unless this is a dry run
  printf '+' >&2
  printf ' %q' "$@" >&2
  echo >&2
  [[ -n $dry ]] || "$@"
}

queue() { do_it gcloud compute tpus queued-resources "$@" "${where[@]}"; }

ssh_to() { # SLICE WORKERS COMMAND
  do_it gcloud compute tpus tpu-vm ssh "$1" --worker="$2" --command="$3" "${where[@]}"
}

copy_to() { # SLICE FILE NAME
  do_it gcloud compute tpus tpu-vm scp "$2" "$1:$3" --worker=all "${where[@]}"
}

every() { # FUNCTION ...: call it for all slices at once (gcloud's --node=all leaves out slices that it can't reach)
  local slice processes=() process failed=0
  [[ $slices != 1 ]] || { "$1" "$name" "${@:2}"; return; }
  for slice in "${names[@]}"; do
    "$1" "$slice" "${@:2}" &
    processes+=($!)
    [[ -z $dry ]] || wait "$!" # to print one after the other
  done
  trap 'kill "${processes[@]}"; exit 130' INT # which processes in the background ignore
  for process in "${processes[@]}"; do wait "$process" || failed=1; done
  trap - INT
  return $failed
}

on_all() { every ssh_to all "$1"; } # COMMAND

check_key() { # gcloud refuses several hosts if an ssh agent has keys but not its own, and stalls at a passphrase
  local print held status=0
  print=$(ssh-keygen -lf "$key" 2>/dev/null | cut -d ' ' -f 2) ||
    fail "ssh: gcloud's key is missing; make it with 'ssh-keygen -t rsa -f $key'"
  held=$(ssh-add -l 2>/dev/null) || status=$?
  [[ $held != *"$print"* ]] || return 0
  [[ $status == 0 ]] || ! ssh-keygen -y -P "" -f "$key" >/dev/null 2>&1 || return 0
  [[ $status != 2 ]] || fail "ssh: gcloud's key has a passphrase, and no agent runs; use 'eval \$(ssh-agent)' and \
'ssh-add $key'"
  fail "ssh: the agent doesn't have gcloud's key, so gcloud can't reach the hosts; use 'ssh-add $key'"
}

needs() { # print what a real run of the command needs
  echo "# needs gcloud ($(command -v gcloud || echo "not installed here")) and 'gcloud auth login'"
  echo "# needs ${PROJECT:-a project} with billing and the APIs tpu.googleapis.com, compute.googleapis.com,\
 storage.googleapis.com for gs://${NFS:+ and file.googleapis.com for a Filestore}"
  [[ $type != tpu7x-* ]] || echo "# needs this API to serve tpu7x; by Google's pages only GKE does: launch/gke.py"
  [[ ! $command =~ ^(create|resume|watch)$ ]] || echo "# needs quota in $ZONE for $slices x $type${spot:+, preemptible}"
  [[ $command == delete ]] ||
    echo "# needs $key, also in the ssh agent, if one runs, and a firewall that lets port 22 in"
  [[ ! $command =~ ^(setup|resume|watch)$ ]] || echo "# needs hosts that can download packages"
  [[ ! $command =~ ^(run|do|watch|stop)$ ]] || echo "# needs hosts that 'setup' has installed"
  [[ ! $command =~ ^(run|do|resume|watch)$ ]] ||
    echo "# needs a --workdir that all hosts can write: ${NFS:+on /mnt/runs, or }on gs://, by their service account"
}

say() { echo "$(date +%T) $name: $1"; }

look() { # set state; it is NONE only if gcloud knows that there is no slice. If gcloud can't tell, set problem and fail
  local describe=(gcloud compute tpus queued-resources describe "$name" --format='value(state.state)' "${where[@]}")
  if ! state=$("${describe[@]}" 2>"$here/problem"); then
    problem=$(paste -s -d ' ' "$here/problem")
    [[ $problem == *NOT_FOUND* ]] || return 1
    state=NONE
  fi
}

look_or_fail() {
  state=NONE # a dry run asks nothing
  [[ -n $dry ]] || look || fail "$name: the state of the slice is unknown, so nothing was done; gcloud says: $problem"
}

wait_for() { # STATE ENDS: wait for STATE, and fail in one of the states ENDS, from which the slice can't get there
  local failures=0
  while true; do
    if look; then
      failures=0
      [[ $state != "$1" ]] || return 0
      [[ ! $state =~ ^($2)$ ]] || fail "$name: the slice is $state; delete it and try again. The reason is in \
'gcloud compute tpus queued-resources describe $name --zone=$ZONE'"
      say "$state"
    else # the network or the login may recover
      failures=$((failures + 1))
      [[ $failures -lt 10 ]] ||
        fail "$name: the state of the slice was unknown in 10 checks in a row; gcloud says: $problem"
      say "the state of the slice is unknown; gcloud says: $problem"
    fi
    sleep "$pause"
  done
}

remember() { # settings in the file of settings, for commands that aren't given them; bash 3 of macOS must do
  local setting
  for setting in "$@"; do
    [[ -n ${!setting+set} ]] || continue
    { grep -v "{$setting+" "$here/settings" 2>/dev/null || true; } >"$here/settings.new"
    # shellcheck disable=SC2016
    printf '[[ -n ${%s+set} ]] || %s=%q\n' "$setting" "$setting" "${!setting}" >>"$here/settings.new"
    mv "$here/settings.new" "$here/settings"
  done
}

create() {
  look_or_fail
  [[ ! $state =~ ^($lost)$ ]] || fail "$name: the slice is $state; delete it first"
  [[ $state != DELETING ]] || wait_for NONE "ACTIVE|$lost"
  if [[ $state == NONE ]]; then
    [[ -n $dry ]] || {
      rm -f "$here/ready" "$here/examined"
      [[ $command == resume ]] || rm -f "$here/settings" "$here/commit"
      remember ZONE PROJECT TYPE SLICES RUNTIME SPOT NFS EXTRAS
    }
    local nodes=(--node-id="$name")
    [[ $slices == 1 ]] || nodes=(--node-count="$slices" --node-prefix="$name")
    queue create "$name" "${nodes[@]}" --accelerator-type="$type" --runtime-version="$runtime" ${spot:+"$spot"}
  else
    say "the slice was requested already and is $state"
  fi
  [[ -z $dry ]] || { on_all true && return; }
  local tries=0
  while wait_for ACTIVE "$lost|DELETING|NONE" && ! on_all true; do
    tries=$((tries + 1))
    [[ $tries -lt 40 ]] || fail "$name: ssh failed 40 times in a row; see what gcloud said, and whether the \
network's firewall lets port 22 in; the slice is there, and costs money until 'delete'"
    say "waiting for ssh"
    sleep "$pause"
  done
}

setup() { # [COMMIT]
  local archive=$here/source.tar.gz commit
  commit=$(git rev-parse "${1:-HEAD}")
  do_it git archive --output="$archive" "$commit"
  every copy_to "$archive" diffeqformer.tar.gz
  # The updates of a new host hold apt's lock for a while. Ubuntu 24.04 manages its Python itself; old pips don't know.
  on_all "set -e; mkdir -p diffeqformer; tar -xzf diffeqformer.tar.gz -C diffeqformer; cd diffeqformer
python3 -m pip --version >/dev/null || sudo apt-get -o DPkg::Lock::Timeout=300 install -qq python3-pip
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv==$uv
~/.local/bin/uv venv --allow-existing --python 3.13 .venv
~/.local/bin/uv pip install --quiet --python .venv/bin/python -e '.[tpu,gcs${EXTRAS:+,$EXTRAS}]' -c constraints.txt
${NFS:+sudo apt-get -o DPkg::Lock::Timeout=300 install -qq nfs-common
sudo mkdir -p /mnt/runs
grep -q /mnt/runs /etc/fstab || echo $NFS /mnt/runs nfs _netdev | sudo tee -a /etc/fstab
mountpoint -q /mnt/runs || sudo mount /mnt/runs
[ -w /mnt/runs ] || sudo chown \$(id -u):\$(id -g) /mnt/runs}"
  [[ -n $dry ]] || {
    echo "$commit" >"$here/commit"
    remember NFS EXTRAS
    touch "$here/ready"
  }
}

# for a host: is the process of run.pid a run, or another process that got the same number after a reboot?
alive="alive() { grep -qzxF diffeqformer.main /proc/\$(cat run.pid)/cmdline; } 2>/dev/null"

# for a host: go to the folder of the package
# without its chips, a run fails, and doesn't go on for days on the host
enter="cd diffeqformer 2>/dev/null && [ -x .venv/bin/python ] || {
echo \"\$HOSTNAME: not set up; use 'setup' first\" >&2; exit 1; }
export JAX_PLATFORMS=\${JAX_PLATFORMS:-tpu,cpu}
$alive"
# Cloud tells the hosts of several slices, and JAX, in their metadata. Without that, each slice would train by itself.
[[ $slices == 1 ]] || enter+="
curl -fsS -H Metadata-Flavor:Google http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env |
grep -Eq \"^MEGASCALE_NUM_SLICES: *'?$slices'?\$\" || {
echo \"\$HOSTNAME: its metadata has no MEGASCALE_NUM_SLICES: '$slices'; delete and create the slices\" >&2; exit 1; }"

examine() { # OPTIONS, quoted; does nothing on a host where a run is in progress
  on_all "$enter
alive || .venv/bin/python -m diffeqformer.doctor --undefok=verify$1"
}

start() { # OPTIONS, quoted; does nothing on a host where this run is in progress
  local asked
  asked=$(printf %q "$1")
  on_all "$enter
if alive && [ \"\$(cat run.options)\" = $asked ]; then echo \"\$HOSTNAME: this run is already in progress\"; exit 0; fi
if alive; then
echo \"\$HOSTNAME: another run is in progress, as process \$(cat run.pid); 'stop' ends it\" >&2; exit 1; fi
printf '%s\\n' $asked >run.options
rm -f run.pid run.status
{ trap '' HUP; .venv/bin/python -m diffeqformer.main$1 & echo \$! >run.pid
wait \$!; status=\$?; [ -e run.status ] || echo \$status >run.status; } >>run.log 2>&1 </dev/null &
until [ -s run.pid ]; do sleep 0.1; done"
}

run() {
  [[ $# -gt 0 ]] || fail "run: give the options of diffeqformer.main, for example --config=configs/large.py"
  local options
  options=$(printf ' %q' "$@")
  if [[ ${DOCTOR-1} == 1 && $(cat "$here/examined" 2>/dev/null) != "$options" ]]; then
    examine "$options"
    [[ -n $dry ]] || echo "$options" >"$here/examined" # after a start that failed on some hosts, the others are busy
  fi
  start "$options"
  [[ -z $dry ]] || return 0
  rm -f "$here/examined"
  echo "$options" >"$here/options" # not earlier: the options of another run in progress must stay
}

resume() {
  [[ -n $dry || -f $here/options ]] || fail "resume: no run was started from this checkout on $name; use 'run'"
  local options=" OPTIONS"
  [[ ! -f $here/options ]] || options=$(<"$here/options")
  look_or_fail
  [[ ($state == ACTIVE && -e $here/ready) || ! -f $here/commit ]] || git cat-file -e "$(<"$here/commit")" 2>/dev/null ||
    fail "resume: the commit $(<"$here/commit"), which the hosts had, isn't in this checkout; use 'create' and 'setup'"
  [[ -z $dry && ! $state =~ ^($lost)$ ]] || delete
  if [[ $state != ACTIVE || ! -e $here/ready ]]; then
    create
    if [[ -f $here/commit ]]; then setup "$(<"$here/commit")"; else setup; fi
    [[ ${DOCTOR-1} == 0 ]] || examine "$options" || { # so that the next attempt examines them, too
      rm -f "$here/ready"
      exit 1
    }
  fi
  start "$options"
}

# for a host: follow a run until it ends; 64: there is none, 70: it failed, 75: a signal or a power cut ended it
follow="cd diffeqformer 2>/dev/null && [ -s run.pid ] || { echo \"\$HOSTNAME: no run was started\" >&2; exit 64; }
$alive
if alive; then tail -n 50 --pid=\$(cat run.pid) -F run.log; sleep 1; else tail -n 50 run.log; fi
case \$(cat run.status 2>/dev/null) in
0) echo \"\$HOSTNAME: the run is complete\" ;;
stopped) echo \"\$HOSTNAME: the run was stopped\" ;;
'' | 129 | 130 | 138 | 140 | 143 | 152) exit 75 ;;
*) exit 70 ;;
esac"

watch() {
  local status checks failures
  while true; do
    status=0
    ssh_to "${names[0]}" "${WORKER:-0}" "$follow" || status=$?
    [[ $status != 0 ]] || return 0
    [[ $status != 64 ]] || fail "watch: use 'run' first, or 'resume' for a run that a preemption ended"
    checks=0 # a run that lost another host fails before the slice is known to be preempted
    until { look || state=ACTIVE; } && [[ $status != 70 || $state != ACTIVE || $checks == 10 ]]; do
      checks=$((checks + 1))
      sleep "$pause"
    done
    [[ $status != 70 || $state != ACTIVE ]] || fail "$name: the run has failed, and the slice is still there"
    [[ ! $state =~ ^(NONE|DELETING)$ ]] || fail "$name: the slice is $state, so the run isn't resumed"
    [[ -f $here/options ]] || fail "watch: the run was started from another checkout; use 'resume' there"
    say "the run was interrupted, or the connection to it, and is resumed"
    failures=0
    until "$BASH" launch/tpu.sh resume; do
      failures=$((failures + 1))
      [[ $failures -lt 10 ]] || fail "$name: 'resume' failed 10 times in a row"
      sleep "$pause"
    done
  done
}

# while a training run has the chips, no other process can use them
do_command() {
  [[ ${1-} =~ ^[a-z]+$ ]] || fail "do: name a command, for example evaluate --workdir=gs://my-bucket/runs/large"
  local options
  options=$([[ $# == 1 ]] || printf ' %q' "${@:2}")
  on_all "$enter
if alive; then
echo \"\$HOSTNAME: a run is in progress, as process \$(cat run.pid); 'stop' ends it\" >&2; exit 1; fi
.venv/bin/python -m diffeqformer.$1$options"
}

stop() {
  on_all "cd diffeqformer 2>/dev/null
$alive
alive || { echo \"\$HOSTNAME: no run is in progress\"; exit 0; }
echo stopped >run.status
kill -TERM \$(cat run.pid) || exit 1
echo \"\$HOSTNAME: the run was told to stop and is saving a checkpoint\"
for look in \$(seq 120); do alive || { echo \"\$HOSTNAME: the run has ended\"; exit 0; }; sleep 5; done
echo \"\$HOSTNAME: the run has not ended in 10 minutes; 'watch' shows its output\" >&2; exit 1"
}

delete() {
  look_or_fail
  [[ -n $dry ]] || rm -f "$here/ready"
  if [[ -n $dry || ! $state =~ ^(NONE|DELETING)$ ]]; then
    queue delete "$name" --force --quiet
  else
    say "nothing to delete: the slice is $state"
  fi
}

[[ -z $dry ]] || needs
[[ -n $dry || ! $command =~ ^(create|resume|watch)$ ]] || check_key # before anything costs money
[[ $command != "do" ]] || command=do_command
"$command" "$@"
