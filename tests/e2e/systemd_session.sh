#!/bin/sh
# systemd_session.sh COMMAND...: COMMAND beside a systemd of its own, both in a mount namespace.
# Needs root. Exit code 77: there can be none here.
set -eu

if [ "${1:-}" != --inside ]; then
    unshare -m --propagation private true 2>/dev/null || exit 77
    code=0
    unshare -m --propagation private "$0" --inside "streamd-test-$$" "$@" || code=$?
    for root in /sys/fs/cgroup/systemd /sys/fs/cgroup; do
        find "$root/streamd-test-$$" -depth -type d -exec rmdir {} \; 2>/dev/null || true
    done
    exit "$code"
fi
name=$2
shift 2

mount -t tmpfs tmpfs /run
mkdir -p /run/systemd/system /run/user/0/systemd
export XDG_RUNTIME_DIR=/run/user/0

# It manages the control groups below its own.
for root in /sys/fs/cgroup/systemd /sys/fs/cgroup; do
    group=$root/$name
    if mkdir "$group" 2>/dev/null && echo $$ >"$group/cgroup.procs" 2>/dev/null; then break; fi
    rmdir "$group" 2>/dev/null || true
done

/lib/systemd/systemd --user --log-target=null &
manager=$!
for _ in $(seq 50); do
    if systemctl --user is-system-running >/dev/null 2>&1; then break; fi
    sleep 0.1
done
code=77
if systemctl --user is-system-running >/dev/null 2>&1; then
    code=0
    "$@" || code=$?
fi
kill -TERM "$manager"
wait "$manager" || true
exit "$code"
