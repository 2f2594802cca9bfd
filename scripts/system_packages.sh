#!/usr/bin/env bash
# The system libraries that simulators render with, or the browser that tests of the dashboard look with.
#
#   scripts/system_packages.sh VENV metaworld [maniskill] [libero]
#   scripts/system_packages.sh VENV browser
#
# As root on Debian or Ubuntu: installs those that are missing. Otherwise: names them, and says what works without.
# ManiSkill refuses the Vulkan driver of Debian 12: a newer one of the same mirror's backports is unpacked into
# VENV/share/joynexus/vulkan, where the env role finds it; the system's own stays as it is.
# Never fails: training, serving and data sets need none of them.
set -uo pipefail
venv=$1
shift

missing=()
need() {  # need LIBRARY PACKAGE: the package is missing if the loader does not find the library
  if ! { ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | grep -F "$1" >/dev/null; then missing+=("$2"); fi
}

old_mesa() {  # whether this is the release whose Vulkan driver ManiSkill refuses
  . /etc/os-release 2>/dev/null && [ "${VERSION_CODENAME:-}" = bookworm ] && [ ! -e /dev/nvidiactl ]
}

backported_driver() (  # unpack the backported driver into the folder $1; a subshell: its traps and settings stay here
  set -e
  into=$1
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
  [ -n "$mirror" ]
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$into"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm-backports main" >"$work/list"
  apt=(apt-get -qq -o "Dir::Etc::SourceList=$work/list" -o Dir::Etc::SourceParts=/dev/null
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=)
  "${apt[@]}" update </dev/null
  (cd "$work" && "${apt[@]}" download mesa-vulkan-drivers </dev/null)
  dpkg -x "$work"/mesa-vulkan-drivers_*.deb "$work/package"
  cp "$work"/package/usr/lib/*/libvulkan_lvp.so "$into/"
  # A path with a slash is read from the manifest's folder on: the environment can be moved.
  sed 's#"libvulkan_lvp.so"#"./libvulkan_lvp.so"#' "$work"/package/usr/share/vulkan/icd.d/lvp_icd*.json >"$work/icd"
  mv "$work/icd" "$into/lvp_icd.json"  # last: it says that all is there
)

if [ "$*" = browser ]; then
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null && exit 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium (some 80 MB)"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null
    apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core </dev/null >/dev/null 2>&1
  fi
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null || echo "There is no Chromium: the tests \
that look at pages are skipped. As root:  apt-get install --no-install-recommends chromium" >&2
  exit 0
fi

need libEGL.so.1 libegl1
need libGL.so.1 libgl1
need libglib-2.0.so.0 libglib2.0-0
need libOSMesa.so libosmesa6
maniskill=false
case " $* " in
  *" maniskill "*)
    maniskill=true
    need libvulkan.so.1 libvulkan1
    need libvulkan_lvp.so mesa-vulkan-drivers
    ;;
esac

if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq </dev/null
  left=()
  for package in "${missing[@]}"; do  # one by one: a release may lack one that another replaces
    apt-get install -y -qq --no-install-recommends "$package" </dev/null >/dev/null 2>&1 || left+=("$package")
  done
  missing=("${left[@]}")
fi

driver=$venv/share/joynexus/vulkan
if $maniskill && old_mesa && [ ! -e "$driver/lvp_icd.json" ]; then
  echo "unpacking a Vulkan driver for ManiSkill into $driver"
  backported_driver "$driver" >/dev/null || cat >&2 <<END
The Vulkan driver that ManiSkill needs could not be unpacked: Debian 12's own is too old, and apt has no mirror with
bookworm-backports (main). Without it: everything works but ManiSkill. Another driver's manifest may be named in
VK_DRIVER_FILES.
END
fi

[ ${#missing[@]} -eq 0 ] && exit 0
cat >&2 <<END
System packages are missing: ${missing[*]}
  As root:  apt-get install --no-install-recommends ${missing[*]}
  Without them: training, serving, data sets and the tests that need no pictures of a simulator work; simulators render
  through EGL (libegl1) or, more slowly, OSMesa (libosmesa6), so one of the two is enough for MetaWorld. ManiSkill needs
  a Vulkan driver (mesa-vulkan-drivers, or NVIDIA's) for states too.
END
exit 0
