#!/usr/bin/env bash
# Runs on the workers, for launch/tpu_vm.py, which sends it together with the code.
#
#   worker.sh install EXTRAS   ends what was started before, removes its variables, and installs the
#                              code with these extras, and a recent Python
#   worker.sh start DIGEST WORDS...
#                              ends what was started before, and starts `vit_jax.main WORDS` in the
#                              background; restarts it whenever it was told to stop and has saved;
#                              removes its variables, which have this digest, when it has ended
#   worker.sh ask OFFSET       prints "job DIGEST: RUNNING CODE WORDS" (yes or no; the exit code or
#                              -), and the log from byte OFFSET
set -euo pipefail
cd "$(dirname "$0")/.."
action=$1
shift

boot_id=/proc/sys/kernel/random/boot_id
runs() {  # a process id from before a reboot may belong to another process now
  [ -e job.pid ] && [ "$(cat job.boot)" = "$(cat "$boot_id")" ] &&
    kill -0 "$(cat job.pid)" 2> /dev/null
}

end_job() {  # a worker's job may outlive that of worker 0
  if runs; then
    kill -KILL -- "-$(cat job.pid)" 2> /dev/null || true
  fi
}

case $action in
install)
  end_job  # before the new variables come, which it would remove when it ends
  rm -f job.env
  python3 -m pip install --quiet --user uv
  [ -d .venv ] || python3 -m uv venv --quiet --python 3.11 .venv
  python3 -m uv pip install --quiet --python .venv/bin/python --constraint launch/constraints.txt \
    --editable ".[$1]"
  ;;

start)
  end_job
  rm -f job.code
  echo "$1" > job.digest
  shift
  echo "$*" > job.words
  PYTHONUNBUFFERED=1 setsid nohup bash launch/worker.sh keep "$@" >> job.log 2>&1 < /dev/null &
  echo $! > job.pid
  cat "$boot_id" > job.boot
  ;;

keep)
  if [ -e job.env ]; then  # the job's variables
    . ./job.env
  fi
  while :; do
    code=0
    .venv/bin/python -m vit_jax.main "$@" || code=$?
    # 75: told to stop, and saved; 143: told to stop before training.
    [ $code = 75 ] || [ $code = 143 ] || break
  done
  rm -f job.env  # it may hold keys and tokens
  echo $code > job.code
  ;;

ask)
  [ -e job.pid ] || exit 0
  running=no
  if runs; then running=yes; fi
  code=-
  [ -e job.code ] && code=$(cat job.code)
  digest=
  [ -e job.digest ] && digest=" $(cat job.digest)"
  echo "job$digest: $running $code $(cat job.words)"
  tail --bytes="+$(($1 + 1))" job.log
  ;;
esac
