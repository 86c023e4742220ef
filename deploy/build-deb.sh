#!/bin/bash
# Build dist/port-agent_VERSION_ARCH.deb for this machine's architecture.
#   build-deb.sh [--wheels] [--output DIR]
# --wheels puts torch and all other dependencies inside (200 MB), for devices without a network and this machine's
# Python version; without it the device fetches them once, from the indexes that /etc/port-agent/install.conf names.
# PYTHON: an interpreter (3.11 or later) with pip and the project's dependencies; default: .venv/bin/python.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(dirname "$here")
python=${PYTHON:-$source/.venv/bin/python}
output=$source/dist
wheels=
while [ $# -gt 0 ]; do
	case $1 in
	--wheels) wheels=--wheels ;;
	--output) output=$2 && shift ;;
	*) echo "usage: build-deb.sh [--wheels] [--output DIR]" >&2 && exit 2 ;;
	esac
	shift
done
for tool in dpkg-deb "$python"; do
	command -v "$tool" >/dev/null || {
		echo "build-deb.sh: no $tool: \`make setup\` makes the Python environment, dpkg-deb comes with dpkg" >&2
		exit 2
	}
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
payload=$root/usr/lib/port-agent
mkdir -p "$root/DEBIAN" "$root/etc/port-agent" "$output"

PYTHON=$python "$here/build-payload.sh" "$payload" "$wheels"
install -m 644 "$source/systemd/port-agent.service" "$payload/port-agent.service"

install -D -m 644 -t "$root/usr/lib/systemd/system" "$source"/systemd/*.service
install -D -m 644 -t "$root/usr/lib/systemd/user" "$source"/systemd/user/*.service
install -D -m 644 -t "$root/etc/xdg/autostart" "$source"/systemd/user/*.desktop
install -D -m 644 "$source/systemd/port-agent.sysusers" "$root/usr/lib/sysusers.d/port-agent.conf"
install -D -m 644 "$source/systemd/port-agent.tmpfiles" "$root/usr/lib/tmpfiles.d/port-agent.conf"
install -D -m 644 -t "$root/usr/lib/udev/rules.d" "$source"/systemd/*.rules
install -D -m 644 "$source/systemd/port-agent.polkit" "$root/usr/share/polkit-1/rules.d/port-agent.rules"
install -D -m 644 -t "$root/etc/port-agent" "$here/install.conf" "$here/config.toml"
install -D -m 644 "$source/LICENSE" "$root/usr/share/doc/port-agent/copyright"
mkdir -p "$root/usr/bin"
ln -s /opt/port-agent/current/bin/port-agent "$root/usr/bin/port-agent"
completion() {
	mkdir -p "$(dirname "$root/$2")"
	PYTHONPATH=$payload/app${PYTHONPATH:+:$PYTHONPATH} "$python" -m shtab --error-unimportable --shell="$1" --prog=port-agent port_agent.cli.build_parser >"$root/$2"
}
completion bash usr/share/bash-completion/completions/port-agent
completion zsh usr/share/zsh/vendor-completions/_port-agent
mkdir -p "$root/usr/share/man/man1"
PYTHONPATH=$payload/app${PYTHONPATH:+:$PYTHONPATH} "$python" -m port_agent.cli manual | gzip -9n >"$root/usr/share/man/man1/port-agent.1.gz"

version=$(sed -n 's/^Version: //p' "$payload"/app/port_agent-*.dist-info/METADATA)
architecture=all
[ -z "$(find "$payload" -name '*.so' -print -quit)" ] && [ -z "$wheels" ] || architecture=$(dpkg --print-architecture)
interpreter="python3 (>= 3.11) | python3.13 | python3.12 | python3.11"
if [ -n "$wheels" ]; then
	interpreter=$("$python" -c 'import sys; print("python3.%d" % sys.version_info[1])')
fi
find "$root" -type d -exec chmod 755 {} +
chmod -R go=u,go-w "$root"
cat >"$root/DEBIAN/control" <<CONTROL
Package: port-agent
Version: $version
Architecture: $architecture
Maintainer: PORT agent contributors <port-agent@localhost>
Section: science
Priority: optional
Installed-Size: $(du -sk --exclude=DEBIAN "$root" | cut -f1)
Depends: $interpreter, python3, libstdc++6, systemd (>= 249), udev, passwd
Suggests: libxss1
Description: Train PyTorch models on the device you own, inside the RAM you give it
 A daemon that trains while the device is charging and left alone, under a hard memory limit, with
 exactly PyTorch's numbers. It pauses within a blink, survives power cuts, and always says why it is
 or is not training.
CONTROL
printf '%s\n' /etc/port-agent/config.toml /etc/port-agent/install.conf /etc/xdg/autostart/port-agent-session.desktop >"$root/DEBIAN/conffiles"
(cd "$root" && find usr etc -type f -exec md5sum {} + >DEBIAN/md5sums)
install -m 755 "$here/debian/postinst" "$here/debian/prerm" "$here/debian/postrm" "$root/DEBIAN/"
compression=-Zxz
[ -z "$wheels" ] || compression=-Znone # wheels are compressed already
package=$output/port-agent_${version}_$architecture.deb
SOURCE_DATE_EPOCH=$(git -C "$source" log -1 --format=%ct 2>/dev/null || date +%s) \
	dpkg-deb --root-owner-group "$compression" --build "$root" "$package" >/dev/null
echo "$package"
