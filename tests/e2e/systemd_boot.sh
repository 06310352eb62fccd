#!/bin/sh
# systemd_boot.sh COMMAND...: COMMAND beside a systemd that is process 1, in namespaces of its own.
# What is written to /etc and /var goes to memory; the only units are those of /etc/systemd/system
# and empty targets. Needs root. Exit code 77: there can be none here, stderr says why.
set -eu

skip() { echo "$1" >&2; exit 77; }

if [ "${1:-}" != --inside ]; then
    mounted=$(findmnt -n -o TARGET -t cgroup2 | head -n 1)
    [ -n "$mounted" ] || skip "no cgroup2 is mounted"
    group=$mounted/streamd-test-$$
    mkdir "$group" 2>/dev/null || skip "no control group can be made"
    unshare --mount --propagation private true 2>/dev/null || skip "no namespace can be made"
    code=0
    unshare --mount --propagation private "$0" --inside "$group" "$@" || code=$?
    for _ in $(seq 50); do # what was killed takes a moment to be gone
        find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null || true
        if [ ! -d "$group" ]; then break; fi
        sleep 0.1
    done
    exit "$code"
fi
group=$2
shift 2

mount -t tmpfs -o mode=755 tmpfs /run || skip "nothing can be mounted"
mkdir -p /run/systemd/system /run/units
for directory in /etc /var; do
    mkdir -p "/run/written$directory" "/run/work$directory"
    layers=lowerdir=$directory,upperdir=/run/written$directory,workdir=/run/work$directory
    mount -t overlay -o "$layers" overlay "$directory" || skip "no overlay can be mounted"
done
for target in test sysinit basic multi-user shutdown; do
    printf '[Unit]\nDefaultDependencies=no\n' >"/run/units/$target.target"
done

echo $$ >"$group/cgroup.procs" || skip "the control group cannot be entered"
export container=streamd-test
export SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units SYSTEMD_GENERATOR_PATH=
# The machine's settings are not a test's to change.
unshare --pid --fork --kill-child --cgroup --mount --mount-proc sh -c '
    for directory in /sys/kernel/mm /proc/sys; do
        mount --bind "$directory" "$directory"
        mount -o remount,bind,ro "$directory"
    done
    umount -R /sys/fs/cgroup
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
    exec /lib/systemd/systemd --system --unit=test.target --log-target=null
' </dev/null >/dev/null 2>&1 &
outside=$!
trap 'kill -KILL "$outside" 2>/dev/null; wait "$outside" 2>/dev/null || true' EXIT
inside() {
    read -r first _ <"/proc/$outside/task/$outside/children" || true
    nsenter --target "$first" --pid --mount --cgroup "$@"
}
code=77
for _ in $(seq 100); do
    if inside systemctl is-system-running >/dev/null 2>&1; then
        code=0
        break
    fi
    sleep 0.1
done
if [ $code = 0 ]; then
    inside "$@" || code=$?
else
    echo "systemd does not start as process 1 of a namespace" >&2
fi
exit "$code"
