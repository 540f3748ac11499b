"""Fake clients of the cloud and the scheduler, which record their calls, and a host of a slice."""

import os
import subprocess
import time

import pytest

from helpers import ROOT

TPU = "launch/tpu.sh"
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0") $*" >>"$CALLS"
if [[ "$*" == *" describe "* ]]; then
  line=$(head -n 1 "$STATES"); sed -i 1d "$STATES"; echo "WARNING: there is a newer gcloud" >&2
  case $line in
    LOGIN) printf 'ERROR: (gcloud)\\nyour login has expired\\n' >&2; exit 1 ;;
    NONE | "") echo "ERROR: (gcloud) NOT_FOUND: Resource 'slice' was not found" >&2; exit 1 ;;
    *) echo "$line" ;;
  esac
  exit
elif [[ "$*" == *" ssh "*--command=true* ]]; then
  line=$(head -n 1 "$DOORS"); sed -i 1d "$DOORS"; exit "${line:-0}"
elif [[ "$*" == *" ssh "* && "$*" != *"/uv venv"* && -n ${HOST_FOLDER-} ]]; then # be the host
  for word; do [[ $word != --command=* ]] || { cd "$HOST_FOLDER" && exec bash -c "${word#--command=}"; }; done
fi
[[ "$*" != *" ${BROKEN:-nothing} "* ]] || exit 1
[[ "$0" != */srun || $JAX_PLATFORMS == cuda,cpu ]] || exit 9
exit "${STATUS:-0}"
"""
RUN = """#!/usr/bin/env bash
[[ $2 != diffeqformer.doctor ]] || { printf '%s|' "$JAX_PLATFORMS $1" "${@:2}" >>examined; exit "${ILL:-0}"; }
trap '/bin/sleep 0.5; touch saved; exit 143' TERM
{ cat said 2>/dev/null; printf '%s|' "$@"; } >saying; mv saying said # whole, or not there
while [[ ! -e end ]]; do /bin/sleep 0.05; done
"""
METADATA = '#!/usr/bin/env bash\n[[ "$*" != */instance/attributes/tpu-env ]] || cat "${0%/*}/tpu-env"\n'
KEYGEN = """#!/usr/bin/env bash
[[ -e $HOME/.ssh/google_compute_engine ]] || exit 255
if [[ $1 == -lf ]]; then echo "3072 SHA256:gcloud me (RSA)"; else [[ -z ${PASSPHRASE-} ]]; fi
"""
AGENT = '#!/usr/bin/env bash\n[[ -n ${AGENT-} ]] || exit 2; echo "$AGENT"\n'
SLEEP = "#!/usr/bin/env bash\nexec /bin/sleep 0.05\n"
VERBS = {"create", "describe", "delete", "ssh", "scp"}
NEW = ["create", "describe", "ssh", "scp", "ssh", "ssh", "ssh"]  # ask for a slice, wait, set it up, examine, run


def verbs_of(calls):
    return [next(word for word in call.split() if word in VERBS) for call in calls if call.startswith("gcloud")]


@pytest.fixture
def cloud(tmp_path):
    """Runs a script with the fake clients, and returns the finished process and the recorded calls."""
    programs = {name: FAKE for name in ("gcloud", "srun", "scontrol")}
    programs |= {"sleep": SLEEP, "curl": METADATA, "ssh-keygen": KEYGEN, "ssh-add": AGENT}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "google_compute_engine").touch()
    files = {name: tmp_path / name for name in ("CALLS", "STATES", "DOORS")}

    def run(script, *arguments, states=(), doors=(), **settings):
        for name, lines in (("CALLS", ()), ("STATES", states), ("DOORS", doors)):
            files[name].write_text("".join(f"{line}\n" for line in lines))
        environment = {**os.environ, "HOME": str(tmp_path), **{name: str(path) for name, path in files.items()}}
        environment |= settings
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NAME": f"test-{os.getpid()}", "PAUSE": "0"}
        done = subprocess.run(
            [ROOT / script, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60
        )
        return done, files["CALLS"].read_text().replace(environment["NAME"], "slice").splitlines()

    yield run
    subprocess.run(["rm", "-rf", ROOT / ".launch" / f"test-{os.getpid()}"], check=True)


@pytest.fixture
def host(tmp_path):
    """The folder of a prepared host. Remote commands run there, with a fake training program."""
    folder = tmp_path / "host" / "diffeqformer"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").write_text(RUN)
    (folder / ".venv" / "bin" / "python").chmod(0o755)
    yield folder
    (folder / "end").touch()


def until(ready):
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)
