#!/bin/sh
# A Slurm cluster of one machine, this one, to try `posbench sweep --slurm`:
#
#     scripts/slurm_local.sh start    install Debian's packages if missing, configure, start, wait for it
#     scripts/slurm_local.sh stop     end its daemons
#
# Debian or Ubuntu, as root, a throwaway machine or container: it writes /etc/slurm/slurm.conf. No systemd needed.
set -eu

STATE=${SLURM_LOCAL_STATE:-/tmp/slurm-local}
HOST=$(hostname -s)
CONFIGURATION=/etc/slurm/slurm.conf

missing() {
    for command in "$@"; do
        command -v "$command" >/dev/null || return 0
    done
    return 1
}

install_packages() {
    if missing slurmctld slurmd munged; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
    fi
}

configure() {
    if [ -f "$CONFIGURATION" ] && ! grep -q slurm_local.sh "$CONFIGURATION"; then
        echo "$CONFIGURATION is not of $0: this machine has a Slurm of its own, and keeps it" >&2
        exit 1
    fi
    mkdir -p "$STATE/state" "$STATE/spool" /etc/slurm
    node=$(slurmd -C | sed -n 's/^NodeName=[^ ]* \(CPUs=.*\)$/\1/p')
    cat > "$CONFIGURATION" <<CONF
# Written by slurm_local.sh.
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

# Run a command again and again until it succeeds, for a minute.
waited() {
    for _ in $(seq 60); do
        if "$@" >/dev/null 2>&1; then
            return
        fi
        sleep 1
    done
    echo "Slurm does not answer '$*'; its logs are in $STATE" >&2
    exit 1
}

is_idle() {
    [ "$(sinfo -h -o %T)" = idle ]
}

start() {
    install_packages
    stop
    configure
    install -d -o munge -g munge /run/munge
    pgrep -x munged >/dev/null || runuser -u munge -- /usr/sbin/munged
    slurmctld
    slurmd
    waited is_idle
    sinfo
}

# End what `start` started, the last one first, and wait until each is gone.
stop() {
    for pid in slurmd slurmctld; do
        end "$STATE/$pid.pid"
    done
}

end() {
    [ -f "$1" ] || return 0
    number=$(cat "$1")
    kill "$number" 2>/dev/null || true
    for _ in $(seq 150); do
        kill -0 "$number" 2>/dev/null || break
        sleep 0.2
    done
    rm -f "$1"
}

usage() {
    echo "usage: $0 start | stop" >&2
    exit 2
}

if [ "$(id -u)" != 0 ]; then
    echo "$0 installs packages and writes /etc/slurm: run it as root, on a machine that may be thrown away" >&2
    exit 1
fi
case "${1:-}" in
    start) start ;;
    stop) stop; end /run/munge/munged.pid ;;
    *) usage ;;
esac
