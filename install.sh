#!/bin/sh
# Installs kubevpn: downloads the archive for this machine and checksums.txt of a release, verifies the checksum, and
# copies the program, its man pages and completions below PREFIX.
#
#   sh install.sh [--version VERSION] [--prefix PREFIX] [--from URL]
#
#   --version   for example 1.2.0; default: the latest release
#   --prefix    default: /usr/local as root, else ~/.local
#   --from      a URL or a directory with the archive and checksums.txt, instead of the release on GitHub
set -eu

repository=

fail() {
	printf 'install.sh: %s\n' "$*" >&2
	exit 1
}

version= from= prefix=
while [ $# -gt 0 ]; do
	[ $# -ge 2 ] || fail "$1 requires a value, or is unknown"
	case $1 in
	--version) version=${2#v} ;;
	--prefix) prefix=$2 ;;
	--from) from=${2%/} ;;
	*) fail "unknown option $1" ;;
	esac
	shift 2
done
if [ -z "$prefix" ]; then
	if [ "$(id -u)" -eq 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi
fi

# fetch NAME FILE: from $from, a URL or a directory.
fetch() {
	case $from in
	https://* | http://*)
		if command -v curl >/dev/null; then
			curl -fsSL -o "$2" "$from/$1"
		elif command -v wget >/dev/null; then
			wget -q -O "$2" "$from/$1"
		else
			fail 'curl or wget is required'
		fi
		;;
	*) cp "$from/$1" "$2" ;;
	esac || fail "cannot download $from/$1"
}

sum() {
	if command -v sha256sum >/dev/null; then
		sha256sum "$1"
	elif command -v shasum >/dev/null; then
		shasum -a 256 "$1"
	else
		fail 'sha256sum or shasum is required'
	fi | cut -d ' ' -f 1
}

case $(uname -s) in
Linux) os=linux ;;
Darwin) os=darwin ;;
*) fail "there is no archive for $(uname -s) that this script installs; see the release" ;;
esac
case $(uname -m) in
x86_64 | amd64) arch=amd64 ;;
aarch64 | arm64) arch=arm64 ;;
*) fail "there is no archive for $(uname -m)" ;;
esac

if [ -z "$from" ]; then
	[ -n "$repository" ] || fail 'this copy belongs to no release: use --from'
	if [ -n "$version" ]; then
		from=https://github.com/$repository/releases/download/v$version
	else
		from=https://github.com/$repository/releases/latest/download
	fi
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

fetch checksums.txt "$work/checksums.txt"
# The only line for this system; with --version, of that version.
line=$(grep -E "^[0-9a-f]{64}  kubevpn_[0-9A-Za-z.+-]+_${os}_$arch\.tar\.gz\$" "$work/checksums.txt" |
	grep -F "  kubevpn_${version:+${version}_}" || true)
[ -n "$line" ] || fail "checksums.txt of $from has no archive ${version:+of version $version }for $os/$arch"
[ "$(printf '%s\n' "$line" | wc -l)" -eq 1 ] || fail "checksums.txt of $from has several archives for $os/$arch"
want=${line%% *}
archive=${line##* }

fetch "$archive" "$work/$archive"
got=$(sum "$work/$archive")
[ "$got" = "$want" ] || fail "$archive has the checksum $got instead of $want: nothing was installed"

mkdir "$work/unpacked"
tar -xzf "$work/$archive" -C "$work/unpacked"

# put FILE DIRECTORY NAME MODE: replaces a running program too.
put() {
	mkdir -p "$2"
	cp "$1" "$2/.$3.new"
	chmod "$4" "$2/.$3.new"
	mv -f "$2/.$3.new" "$2/$3"
}
cd "$work/unpacked"
put kubevpn "$prefix/bin" kubevpn 0755
for page in man/*.1.gz; do
	[ ! -e "$page" ] || put "$page" "$prefix/share/man/man1" "${page##*/}" 0644
done
put completions/kubevpn.bash "$prefix/share/bash-completion/completions" kubevpn 0644
put completions/_kubevpn "$prefix/share/zsh/site-functions" _kubevpn 0644
put completions/kubevpn.fish "$prefix/share/fish/vendor_completions.d" kubevpn.fish 0644

printf 'installed %s\n' "$prefix/bin/kubevpn"
case :$PATH: in
*":$prefix/bin:"*) ;;
*) printf '%s is not in your PATH\n' "$prefix/bin" ;;
esac
