#!/bin/bash
# Boots systemd as process 1 of new namespaces, on a copy of this machine's files that a tmpfs holds:
#
#   boot.sh DIRECTORY CGROUP
#
# DIRECTORY/files is copied into the file system. Nothing of this machine changes: /etc and /usr are an overlay, and /run,
# /tmp, /dev and /var/lib are new. systemd finds only the units of Debian that DIRECTORY/units names, so that none
# sets sysctls or loads modules, and those that the test installs.
set -euo pipefail

if [ $$ != 1 ]; then
	echo $$ >"$2/cgroup.procs"
	exec unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child=KILL "$0" "$@"
fi
directory=$1
mount --make-rprivate /
mount -t tmpfs tmpfs "$directory/root"
cd "$directory/root"
mkdir upper work new
mount -t overlay overlay -o "lowerdir=/,upperdir=$PWD/upper,workdir=$PWD/work" new
new=$PWD/new
for dir in run tmp dev var/lib; do mount -t tmpfs tmpfs "$new/$dir"; done
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
mkdir "$new/dev/net" "$new/dev/shm" "$new/dev/pts"
for device in null zero full random urandom net/tun; do
	touch "$new/dev/$device"
	mount --bind "/dev/$device" "$new/dev/$device"
done
ln -s /proc/self/fd "$new/dev/fd"
rm -rf "$new/etc/kubevpn" "$new/usr/local/libexec/kubevpn"
rm -f "$new/etc/resolv.conf" "$new"/etc/systemd/system/kubevpn-*
cp -a --no-preserve=ownership "$directory/files/." "$new"
echo 'alice:*:20000:0:99999:7:::' >>"$new/etc/shadow" # who calls sudo
units=$new/run/units
mkdir "$units"
while read -r unit; do cp -P "/lib/systemd/system/$unit" "$units"; done <"$directory/units"
# basic.target without sysinit.target, and a target that starts what the tests need.
printf '[Unit]\n' >"$units/sysinit.target"
printf '[Unit]\nRequires=sockets.target dbus.service systemd-journald.socket\nAfter=sockets.target dbus.service\nAllowIsolate=yes\n' >"$units/test.target"
cd "$new"
mkdir -p run/old
pivot_root . run/old
umount -l /run/old
rmdir /run/old
mount --make-rshared /
ip link set lo up
exec env -i container=kubevpn-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/units /lib/systemd/systemd --unit=test.target --log-target=console
