#!/bin/sh
# Installs kubevpn: downloads the archive for this machine and checksums.txt of a release, verifies the signature, the
# checksum and the provenance, and copies the program, its man pages and completions below PREFIX.
#
#   sh install.sh [--version VERSION] [--prefix PREFIX] [--from URL] [--key FILE]
#
#   --version   for example 1.2.0; default: the latest release
#   --prefix    default: /usr/local as root, else ~/.local
#   --from      a URL or a directory with the files of the release, instead of the release on GitHub
#   --key       the public key that verifies both signatures; default: the certificate of the workflow on GitHub
#
# Only cosign can verify signature and provenance. With --key it is required; without cosign and --key the script says
# that it verified only the checksum.
set -eu

repository=

fail() {
	printf 'install.sh: %s\n' "$*" >&2
	exit 1
}

# is_loopback URL: the only http that no other machine can change.
is_loopback() {
	authority=${1#http://}
	authority=${authority%%[/?#]*}
	case $authority in
	*@* | *\\*) false ;; # the host may be what follows
	localhost | localhost:* | 127.0.0.1 | 127.0.0.1:* | '[::1]' | '[::1]':*) ;;
	*) false ;;
	esac
}

# fetch NAME FILE: from $from, a URL or a directory. It follows redirects to https alone.
fetch() {
	case $from in
	https://*) curl -fsSL --proto '=https' --proto-redir '=https' -o "$2" "$from/$1" ;;
	http://*) curl -fsS --proto '=http' -o "$2" "$from/$1" ;;
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

# quoted TEXT: as a regular expression.
quoted() { printf '%s' "$1" | sed 's/[.+]/\\&/g'; }

# verify FILE BUNDLE WHAT COMMAND...: by a command of cosign, that $key or the workflow that releases $version signed
# BUNDLE, and for FILE.
verify() {
	fetch "$2" "$work/bundle"
	file=$1 what=$3
	shift 3
	if [ -n "$key" ]; then
		set -- "$@" --key "$key" --insecure-ignore-tlog
	else
		tag='[^/]+'
		[ -z "$version" ] || tag=$(quoted "$version")
		set -- "$@" --certificate-oidc-issuer https://token.actions.githubusercontent.com --certificate-identity-regexp \
			"^https://github\.com/$(quoted "$repository")/\.github/workflows/release\.yaml@refs/tags/v$tag\$"
	fi
	said=$(cosign "$@" --bundle "$work/bundle" "$work/$file" 2>&1) ||
		fail "the $what of $file is wrong, or cosign is older than 3.0: nothing was installed: $said"
}

# can_verify: whether it is known who has to have signed the release, and cosign is there. Else it says what is missing.
can_verify() {
	if ! command -v cosign >/dev/null; then
		[ -z "$key" ] || fail '--key requires cosign: https://docs.sigstore.dev/cosign/system_config/installation'
		printf 'install.sh: cosign is missing: verifying the checksum, but not who signed it and who built it\n' >&2
	elif [ -n "$key$repository" ]; then
		return 0
	else
		printf 'install.sh: this copy belongs to no release: verifying the checksum only; --key verifies the signature\n' >&2
	fi
	return 1
}

# put FILE DIRECTORY NAME MODE: replaces a running program too.
put() {
	mkdir -p "$2"
	cp "$1" "$2/.$3.new"
	chmod "$4" "$2/.$3.new"
	mv -f "$2/.$3.new" "$2/$3"
}

main() {
	version= from= prefix= key=
	while [ $# -gt 0 ]; do
		[ $# -ge 2 ] || fail "$1 requires a value, or is unknown"
		case $1 in
		--version) version=${2#v} ;;
		--prefix) prefix=$2 ;;
		--from) from=${2%/} ;;
		--key) key=$2 ;;
		*) fail "unknown option $1" ;;
		esac
		shift 2
	done
	[ -z "$key" ] || [ -f "$key" ] || fail "there is no file $key"
	if [ -z "$prefix" ]; then
		if [ "$(id -u)" -eq 0 ]; then prefix=/usr/local; else prefix=$HOME/.local; fi
	fi

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
	case $from in
	http://*) is_loopback "$from" || fail "$from: anybody on the way can change what http downloads; use https" ;;
	esac
	case $from in
	http://* | https://*) command -v curl >/dev/null || fail 'curl is required' ;;
	esac

	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	trap 'exit 1' HUP INT TERM

	fetch checksums.txt "$work/checksums.txt"
	verified=checksum
	if can_verify; then
		verify checksums.txt checksums.txt.sigstore.json signature verify-blob
		verified='signature, checksum and provenance'
	fi
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
	[ "$verified" = checksum ] ||
		verify "$archive" provenance.intoto.jsonl provenance verify-blob-attestation --type slsaprovenance1

	mkdir "$work/unpacked"
	tar -xzf "$work/$archive" -C "$work/unpacked"

	cd "$work/unpacked"
	put kubevpn "$prefix/bin" kubevpn 0755
	for page in man/*.1.gz; do
		[ ! -e "$page" ] || put "$page" "$prefix/share/man/man1" "${page##*/}" 0644
	done
	put completions/kubevpn.bash "$prefix/share/bash-completion/completions" kubevpn 0644
	put completions/_kubevpn "$prefix/share/zsh/site-functions" _kubevpn 0644
	put completions/kubevpn.fish "$prefix/share/fish/vendor_completions.d" kubevpn.fish 0644

	printf 'installed %s; verified: %s\n' "$prefix/bin/kubevpn" "$verified"
	case :$PATH: in
	*":$prefix/bin:"*) ;;
	*) printf '%s is not in your PATH\n' "$prefix/bin" ;;
	esac
}

# Nothing runs before the last byte of the script has arrived.
{ main "$@"; }
