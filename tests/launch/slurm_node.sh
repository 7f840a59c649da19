#!/usr/bin/env bash
# A Slurm of one node, on the loopback interface alone, of Debian's packages.
#
#   slurm_node.sh install        as root: slurm-wlm and munge, if they are not there
#   slurm_node.sh start FOLDER   its configuration, state and logs lie in FOLDER; waits until idle
#   slurm_node.sh stop FOLDER    ends what `start` has started, all jobs included
#
# Commands such as sbatch need SLURM_CONF=FOLDER/slurm.conf.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin  # where runuser and the daemons are

action=$1
folder=${2:-}

case $action in
install)
  if ! command -v slurmctld munged slurmd > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    get="timeout --kill-after=10 240 apt-get -qq -o DPkg::Lock::Timeout=60"  # mirrors may not answer
    $get update
    # Without their services, which would start daemons of their own.
    policy=/usr/sbin/policy-rc.d
    if ! [ -e $policy ]; then
      trap "rm $policy" EXIT
      printf '#!/bin/sh\nexit 101\n' > $policy
      chmod +x $policy
    fi
    $get install -y --no-install-recommends slurm-wlm munge > /dev/null
  fi
  ;;

start)
  mkdir -p "$folder"/{state,spool,log}
  cat > "$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort=${SLURM_TEST_PORT:-16817}
SlurmdPort=$((${SLURM_TEST_PORT:-16817} + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=10
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/log/slurmctld
SlurmdLogFile=$folder/log/slurmd
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=localhost CPUs=4 State=UNKNOWN
PartitionName=test Nodes=localhost Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
END
  dd if=/dev/urandom of="$folder/munge.key" bs=1 count=128 status=none
  chown munge "$folder" "$folder/munge.key"
  chmod 400 "$folder/munge.key"
  chmod 711 "$folder"
  runuser -u munge -- munged --force --key-file="$folder/munge.key" --seed-file="$folder/munge.seed" \
    --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" --log-file="$folder/munged.log"
  slurmctld -c -f "$folder/slurm.conf"
  slurmd -c -N localhost -f "$folder/slurm.conf"
  export SLURM_CONF=$folder/slurm.conf
  for _ in $(seq 100); do
    state=$(sinfo --noheader --format=%T 2>&1 || true)
    [ "$state" = idle ] && exit 0
    sleep 0.2
  done
  echo "Slurm did not start: $state" >&2
  tail -n 20 "$folder"/log/* "$folder/munged.log" >&2
  exit 1
  ;;

stop)
  SLURM_CONF=$folder/slurm.conf scancel --full --signal=KILL --state=RUNNING 2> /dev/null || true
  for name in slurmd slurmctld munged; do
    [ -s "$folder/$name.pid" ] || continue
    pid=$(cat "$folder/$name.pid")
    kill "$pid" || continue
    for _ in $(seq 50); do
      kill -0 "$pid" 2> /dev/null || break
      sleep 0.1
    done
  done
  ;;
esac
