#!/bin/bash
# Remove PORT agent from macOS. Jobs, results and settings stay unless --purge is given.
set -euo pipefail

plist=/Library/LaunchDaemons/org.port-agent.daemon.plist
[ "$(id -u)" = 0 ] || {
	echo "uninstall.sh: needs root: sudo $0" >&2
	exit 1
}
state=
if [ -f "$plist" ]; then
	state=$(plutil -extract ProgramArguments.5 raw "$plist")
	launchctl bootout system/org.port-agent.daemon 2>/dev/null || true # it may not be loaded
fi
rm -f "$plist" /usr/local/bin/port-agent
rm -rf /opt/port-agent /usr/local/lib/port-agent
if [ "${1-}" = --purge ]; then
	rm -rf /etc/port-agent
	[ -z "$state" ] || rm -rf "$state"
else
	echo "uninstall.sh: jobs stay in ${state:-the state directory}, settings in /etc/port-agent; --purge takes them too"
fi
