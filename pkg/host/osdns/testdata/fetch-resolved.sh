#!/bin/sh
# Unpacks Debian's systemd-resolved, without installing it, for this package's tests. Installing the package
# would replace the machine's /etc/resolv.conf.
#
#	fetch-resolved.sh [DIRECTORY]      default: ~/.cache/kubevpn/systemd-resolved
set -eu
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/kubevpn/systemd-resolved}
[ -x "$dir/lib/systemd/systemd-resolved" ] && exit 0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"
cd "$tmp"
apt-get -qq download systemd-resolved libsystemd-shared
mkdir root
for deb in ./*.deb; do dpkg-deb -x "$deb" root; done
mkdir -p "$(dirname "$dir")"
rm -rf "$dir"
mv root "$dir"
