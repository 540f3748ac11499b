#!/usr/bin/env bash
# All that needs an NVIDIA GPU, in about ten minutes at most: the tests of `make test-gpu`, then the benchmarks.
#
#   benchmarks/on_gpu.sh                      write runs/gpu-<device>-<time>.md
#   benchmarks/on_gpu.sh FOLDER               write it there
#
# The file grows part by part. A benchmark that doesn't fit into the GPU's memory, or isn't done in its time, is skipped
# with the reason. One GPU is used, and eight for one benchmark where there are as many. The status is 1 if a part
# failed. Settings are environment variables, with their defaults in parentheses:
#   PYTHON   the interpreter (.venv/bin/python if it is there, else python3). It needs JAX with CUDA, what setup.py
#            requires (except what starts with tensorflow, and seqio) and pytest, but not this package itself
#   MINUTES  for everything (10)

set -euo pipefail
here=$(realpath "$(dirname "$0")/..")
folder=$(realpath -m "${1:-$here/runs}")
python=${PYTHON:-python3}
[[ -n ${PYTHON-} || ! -x $here/.venv/bin/python ]] || python=$here/.venv/bin/python
minutes=${MINUTES:-10}
work=$(mktemp -d)
running=
trap '[[ -z $running ]] || kill "$running" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
  echo "benchmarks/on_gpu.sh: $1" >&2
  exit 1
}

[[ $minutes =~ ^[0-9]+$ ]] || fail "MINUTES: must be a whole number, but it is $minutes"
minutes=$((10#$minutes))
[[ $python != */* ]] || python=$(realpath -s "$python")
cd "$here"
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
[[ -n ${XLA_PYTHON_CLIENT_MEM_FRACTION-} ]] || # the older name
  export XLA_CLIENT_MEM_FRACTION=${XLA_CLIENT_MEM_FRACTION:-0.92} # JAX's default is 0.75

devices='
import jax, pytest, diffeqformer.training.loop
first = jax.devices()[0]
print(first.platform, jax.device_count(), jax.__version__, first.device_kind)'
"$python" -c "$devices" >"$work/found" 2>"$work/errors" || fail "$python: $(tail -n 1 "$work/errors")"
read -r platform count version device < <(tail -n 1 "$work/found")
[[ $platform == gpu ]] || fail "needs an NVIDIA GPU and jax[cuda], but $python finds only $count x $device"
all=${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $((count - 1)))}
export CUDA_VISIBLE_DEVICES=${all%%,*}

mkdir -p "$folder"
file=$folder/gpu-${device//[^A-Za-z0-9]/-}-$(date +%Y%m%d-%H%M%S).md
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
commit=$(git describe --always --dirty 2>/dev/null || true)
{
  printf '# %s, driver %s, jax %s, %s\n\n' "$device" "${driver:-unknown}" "$version" "$(date +%F)"
  echo "This machine has $count of them. Commit ${commit:-unknown}, $("$python" --version)."
} >"$file"
failed=0

say() { # how a part ended
  printf '\n%s\n' "$1" >>"$file"
  echo "  $1"
}

part() { # NAME SECONDS COMMAND...: run a command for at most so long
  local name=$1 limit=$2 left=$((60 * minutes - SECONDS)) began=$SECONDS status=0 took reason fence=
  shift 2
  echo "$name"
  printf '\n## %s\n\n    %s\n\n' "$name" "$*" >>"$file"
  [[ $left -ge 20 ]] || { say "Skipped: the $minutes minutes are over, and MINUTES sets more." && return; }
  [[ $limit -le $left ]] || limit=$left
  [[ $name != Tests ]] || fence='~~~'
  [[ -z $fence ]] || echo "$fence" >>"$file"
  timeout --kill-after=10 "$limit" "$@" >>"$file" 2>"$work/errors" &
  running=$!
  wait "$running" || status=$?
  running=
  took=$((SECONDS - began))
  [[ -z $fence ]] || echo "$fence" >>"$file"
  reason=$(grep -E "^diffeqformer: .*not enough memory|^[A-Za-z_.]+Error: RESOURCE_EXHAUSTED" "$work/errors" || true)
  if [[ $status == 0 ]]; then
    say "Done in $took s."
  elif [[ $name != Tests && -n $reason ]]; then
    say "Skipped: it doesn't fit into the GPU's memory ('${reason:0:200}')."
  elif [[ $name != Tests && ($status == 124 || $took -gt $limit) ]]; then
    say "Skipped: not done in $limit s."
  else
    failed=1
    printf '\n~~~\n%s\n~~~\n' "$(tail -n 20 "$work/errors")" >>"$file"
    say "FAILED with status $status after $took s."
  fi
}

pair=--models=gpt:diffeqformer,gpt:gpt
part Tests 360 env TEST_PLATFORMS=cuda,cpu "$python" -m pytest -m gpu -v tests/test_gpu.py
part "Train step, GPT-medium" 150 "$python" benchmarks/train_step.py "$pair" --shape=medium --batch_size=32
part "Rematerialisation, GPT-medium" 150 "$python" benchmarks/train_step.py --shape=medium --batch_size=16 \
  --models=gpt:diffeqformer:step,gpt:diffeqformer:products,gpt:diffeqformer:none,gpt:gpt
part "Generation, GPT-small" 100 "$python" benchmarks/generation.py "$pair" --width=768 --heads=12 \
  --time_embed_dim=20 --sinusoidal_dim=128 --sequence_length=1024 --dtype=bfloat16
part "Train step, GPT-large" 200 \
  "$python" benchmarks/train_step.py "$pair" --shape=large --batch_size=16 --remat=products
[[ $count -lt 8 ]] || part "Train step, GPT-large, 8 GPUs" 200 env CUDA_VISIBLE_DEVICES="$all" \
  "$python" benchmarks/train_step.py "$pair" --shape=large --batch_size=128 --fsdp=8
echo "$file"
exit "$failed"
