#!/bin/sh
# The test of the pipelines: it starts the new version of web, and asks the cluster for it.
set -eu
cd "$(dirname "$0")/../.."

python3 -m http.server 8080 --bind 127.0.0.1 --directory examples/site 2>/dev/null &
trap 'kill $!' EXIT
curl -fs --retry 30 --retry-delay 1 --retry-connrefused -o /dev/null http://127.0.0.1:8080/

# expect WANT CURL-ARGUMENTS...: that an answer of web is from the new version, or is not.
expect() {
	want=$1
	shift
	answer=$(curl -fsS "$@" http://web.kubevpn-example)
	printf '%s\n' "$answer"
	case $answer in
	*'this machine'*) [ "$want" = new ] ;;
	*) [ "$want" = old ] ;;
	esac
}
expect new -H "x-job: ${CI_JOB:-local}"
expect old
