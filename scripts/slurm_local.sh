#!/bin/sh
# A Slurm cluster of one machine, this one, to try `posbench sweep hydra/launcher=submitit_slurm`:
#
#     scripts/slurm_local.sh start     install Debian's packages if missing, configure, start, wait until it is idle
#     scripts/slurm_local.sh stop      end its daemons
#
# Debian or Ubuntu, as root, a throwaway machine or container: it writes /etc/slurm/slurm.conf. No systemd needed, and no
# accounting (slurmdbd): posbench reads the outcome of its runs from their folders.
set -eu

STATE=${SLURM_LOCAL_STATE:-/tmp/slurm-local}
HOST=$(hostname -s)

install_packages() {
    if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v munged >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
    fi
}

configure() {
    mkdir -p "$STATE/state" "$STATE/spool" /etc/slurm
    node=$(slurmd -C | sed -n 's/^NodeName=[^ ]* \(CPUs=.*\)$/\1/p')
    cat > /etc/slurm/slurm.conf <<CONF
ClusterName=local
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=$STATE/state
SlurmdSpoolDir=$STATE/spool
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
SlurmctldLogFile=$STATE/slurmctld.log
SlurmdLogFile=$STATE/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
KillWait=10
MpiDefault=none
NodeName=$HOST NodeAddr=127.0.0.1 $node State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
    install_packages
    configure
    install -d -o munge -g munge /run/munge
    pgrep -x munged >/dev/null || runuser -u munge -- /usr/sbin/munged
    pgrep -x slurmctld >/dev/null || slurmctld
    pgrep -x slurmd >/dev/null || slurmd
    for _ in $(seq 30); do
        if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then
            sinfo
            return
        fi
        sleep 1
    done
    echo "Slurm did not become idle; its logs are in $STATE" >&2
    exit 1
}

stop() {
    for name in slurmd slurmctld; do
        [ ! -f "$STATE/$name.pid" ] || kill "$(cat "$STATE/$name.pid")"
    done
    pid=/run/munge/munged.pid
    [ ! -f "$pid" ] || kill "$(cat "$pid")"
}

case "${1:-}" in
    start) start ;;
    stop) stop ;;
    *) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac
