#!/bin/bash
# Install or upgrade PORT agent on macOS, from a checkout: versions in /opt/port-agent, started by launchd at boot.
#   sudo deploy/macos/install.sh [--user NAME]
# The agent runs as NAME (default: whoever called sudo), who owns its jobs. An upgrade that does not come up is rolled
# back, as on Linux (versions.py). Needs CPython 3.11 or later from python.org or Homebrew; works with bash 3.2.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
deploy=$(dirname "$here")
payload=/usr/local/lib/port-agent
plist=/Library/LaunchDaemons/org.port-agent.daemon.plist
user=${SUDO_USER-}
export PATH=/opt/homebrew/bin:/usr/local/bin:$PATH

fail() {
	echo "install.sh: $*" >&2
	exit 1
}

if [ "${1-}" = --user ]; then
	user=$2
fi
[ "$(uname -s)" = Darwin ] || fail "this is for macOS; on Linux use deploy/install.sh"
[ "$(id -u)" = 0 ] || fail "needs root: sudo $0"
if [ -z "$user" ] || [ "$user" = root ]; then
	fail "name the user whose jobs these are: --user NAME"
fi
home=$(dscl . -read "/Users/$user" NFSHomeDirectory | sed 's/^NFSHomeDirectory: //')
[ -d "$home" ] || fail "user $user has no home directory"

python=
for name in python3.13 python3.12 python3.11 python3; do
	if command -v "$name" >/dev/null && "$name" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		python=$(command -v "$name")
		break
	fi
done
[ -n "$python" ] || fail "no Python 3.11 or later: install one from python.org or with \`brew install python@3.13\`"

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
"$environment/bin/pip" install -q "setuptools>=77" wheel
rm -rf "$payload.new"
PYTHON=$environment/bin/python "$deploy/build-payload.sh" "$payload.new"
rm -rf "$payload"
mv "$payload.new" "$payload"

mkdir -p /etc/port-agent
for file in config.toml install.conf; do
	[ -f "/etc/port-agent/$file" ] || install -m 644 "$deploy/$file" "/etc/port-agent/$file"
done
# PyPI's wheels for macOS are CPU and Metal builds already: there is nothing to pin.
sed -i '' 's|^PORT_TORCH_INDEX=https://download.pytorch.org/whl/cpu$|PORT_TORCH_INDEX=|' /etc/port-agent/install.conf
sudo -u "$user" mkdir -p "$home/.local/state/port-agent" "$home/Library/Logs"
sed -e "s|@USER@|$user|g" -e "s|@HOME@|$home|g" "$here/org.port-agent.daemon.plist" >"$plist"
chmod 644 "$plist"
plutil -lint -s "$plist"

PORT_PYTHON=$python "$python" "$payload/port-agent-versions" install
mkdir -p /usr/local/bin
ln -sf /opt/port-agent/current/bin/port-agent /usr/local/bin/port-agent
echo "install.sh: port-agent runs as $user; try: port-agent status"
