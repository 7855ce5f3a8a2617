#!/bin/sh
# Unpacks Debian's Docker Engine, without installing it, for the suite "docker". Installing the package would start an
# engine, which changes the machine's network.
#
#	fetch-docker.sh [DIRECTORY]      default: ~/.cache/kubevpn/docker.io
set -eu
dir=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/kubevpn/docker.io}
[ -x "$dir/usr/sbin/dockerd" ] && exit 0
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
chmod 755 "$tmp"
cd "$tmp"
apt-get -qq download docker.io libdevmapper1.02.1
mkdir root
for deb in ./*.deb; do dpkg-deb -x "$deb" root; done
mkdir -p "$(dirname "$dir")"
rm -rf "$dir"
mv root "$dir"
